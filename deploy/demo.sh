#!/usr/bin/env bash
# Starts a cluster in a folder of its own on a free port, streams one answer, shows what it cost, and
# stops everything again. Exit code 0 only if an answer came.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

run=$(mktemp -d "${TMPDIR:-/tmp}/tandem-demo.XXXXXX")
# shellcheck disable=SC2317 # called by the trap
finish() {
    "$here/local.sh" down --dir "$run/run" >/dev/null || true
    rm -rf "$run"
}
trap finish EXIT
trap 'exit 130' INT TERM HUP

echo 'demo: starting a cluster'
if ! "$here/local.sh" up --dir "$run/run" --port 0 "$@" >"$run/up.log" 2>&1; then
    cat "$run/up.log" >&2
    echo 'demo: error: the cluster did not come up (above)' >&2
    exit 1
fi
sed -n '/ ready, /p' "$run/up.log"
rc=0
python3 "$here/demo.py" "$run/run/cluster.json" || rc=$?
if [[ $rc -eq 0 ]]; then
    echo 'demo: stopping the cluster; to keep one: make up'
else
    for log in "$run"/run/*.log; do
        echo "--- ${log##*/}" >&2
        tail -n 5 "$log" >&2
    done
    echo 'demo: error: no answer came (the ends of all logs are above)' >&2
fi
exit "$rc"
