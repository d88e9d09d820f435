#!/usr/bin/env bash
# Puts Tandem below DESTDIR, for PREFIX: programs, systemd units, the user they run as, manual pages,
# completion, guides, sample configurations. Called by make install.
set -euo pipefail

[[ $# -eq 3 && -d $1 && $3 == /* ]] || {
    echo 'usage: deploy/install.sh FOLDER-OF-PROGRAMS DESTDIR PREFIX (an absolute path)' >&2
    exit 2
}
top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bin=$1 root=$2$3 prefix=$3
programs=(tandem-router tandem-prefill tandem-decode tandem-kvstore tandemctl tandem-sim tandem-bench
    tandem-train-heads tandem-truncate)

for program in "${programs[@]}"; do
    install -D -m 0755 "$bin/$program" "$root/bin/$program"
done
for unit in "$top"/deploy/systemd/*.service; do
    install -d "$root/lib/systemd/system"
    sed "s|@PREFIX@|$prefix|g" "$unit" >"$root/lib/systemd/system/$(basename "$unit")"
    chmod 0644 "$root/lib/systemd/system/$(basename "$unit")"
done
install -D -m 0644 "$top/deploy/systemd/tandem.sysusers" "$root/lib/sysusers.d/tandem.conf"
install -D -m 0644 "$top/deploy/tandemctl.1" "$root/share/man/man1/tandemctl.1"
for program in "${programs[@]}"; do
    page=$root/share/man/man1/$program.1
    if [[ $program != tandemctl ]]; then
        "$top/deploy/man.sh" "$bin/$program" | sed "s|@PREFIX@|$prefix|g" >"$page"
        chmod 0644 "$page"
    fi
done
for guide in OPERATIONS SECURITY ADMIN; do
    install -D -m 0644 "$top/deploy/$guide.md" "$root/share/doc/tandem/$guide.md"
done
install -D -m 0644 "$top/deploy/tandemctl.bash" "$root/share/bash-completion/completions/tandemctl"
install -D -m 0644 "$top/README.md" "$root/share/doc/tandem/README.md"
install -D -m 0644 "$top/LICENSE" "$root/share/doc/tandem/LICENSE"
for preset in chat batch edge; do
    for file in "$top/deploy/config/$preset"/*.yaml; do
        install -D -m 0644 "$file" "$root/share/tandem/config/$preset/$(basename "$file")"
    done
done
printf 'installed below %s\n' "${root:-/}"
