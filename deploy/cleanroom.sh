#!/usr/bin/env bash
# Shows that a fresh machine needs nothing but what README.md says: makes a minimal Debian 12 root,
# clones HEAD into it, and runs `make demo` and `CI=true make check` inside. Needs root, for mounts.
#
# What is the machine's and not the project's (package sources, pip settings, certificates, proxies,
# name resolution) is taken from the host when this runs, goes into the temporary root only, and
# disappears with it.
#
# usage: deploy/cleanroom.sh [COMMAND]    (default: make demo && CI=true make check)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=deploy/debian.sh
. deploy/debian.sh

INCLUDE=git,make,curl,ca-certificates
DEFAULT_COMMAND='make demo && CI=true make check'

say() { printf 'cleanroom: %s\n' "$*"; }
fail() {
    printf 'cleanroom: error: %s\n' "$*" >&2
    exit 1
}

# --- what is the host's ---------------------------------------------------------------------------

# Variables that say how to reach the world, as NAME=VALUE, each ended by NUL.
host_variables() {
    local name
    while IFS= read -r name; do
        case $name in
        PIP_* | *_CA_BUNDLE | SSL_CERT_FILE | SSL_CERT_DIR | GIT_SSL_CAINFO | *_proxy | \
            HTTP_PROXY | HTTPS_PROXY | FTP_PROXY | ALL_PROXY | NO_PROXY)
            printf '%s=%s\0' "$name" "${!name}"
            ;;
        esac
    done < <(compgen -e)
}

pip_files() {
    local file
    for file in /etc/pip.conf "${HOME:-/root}/.config/pip/pip.conf" "${HOME:-/root}/.pip/pip.conf" \
        "${PIP_CONFIG_FILE:-}"; do
        if [[ -f $file ]]; then
            printf '%s\n' "$file"
        fi
    done
}

# Files and folders that those variables and pip's settings name: folders of packages, certificates.
named_paths() {
    {
        host_variables | tr '\0' '\n' | cut -d= -f2-
        pip_files | while IFS= read -r file; do cat "$file"; done
    } | tr ' \t=,:' '\n' | grep '^/[^/]' | sort -u || true
}

# --- the root -------------------------------------------------------------------------------------

mounted=()
mount_in() { # TARGET MOUNT_ARGUMENTS...
    local target=$root$1
    shift
    mkdir -p "$target"
    mount "$@" "$target"
    mounted+=("$target")
}

# shellcheck disable=SC2317 # called by the trap
finish() {
    local i target
    # What the commands inside mounted (ip netns mounts /run/netns), the last first.
    while IFS= read -r target; do
        umount -l "$target" || true
    done < <(awk -v under="$root/run/" 'index($2, under) == 1 { print $2 }' /proc/mounts | tac)
    for ((i = ${#mounted[@]} - 1; i >= 0; i--)); do
        umount "${mounted[i]}" 2>/dev/null || umount -l "${mounted[i]}" || true
    done
    rm -rf --one-file-system "$work"
}

bring_host_settings() {
    local path
    say "2/4 the host's package sources, pip settings, certificates and name resolution"
    for path in /etc/resolv.conf /etc/hosts; do
        rm -f "$root$path"
        copy_into "$root" "$path"
    done
    while IFS= read -r path; do copy_into "$root" "$path"; done < <(pip_files)
    bring_certificates "$root" "$work/log"
    mount_in /proc -t proc proc
    mount_in /sys --rbind --make-rslave /sys
    mount_in /dev --bind /dev
    mount_in /dev/shm --bind /dev/shm
    while IFS= read -r path; do
        case $path in /etc/ssl/certs | /dev* | /proc* | /sys* | / | /usr | /etc | /tmp) continue ;; esac
        if [[ -d $path ]]; then
            mount_in "$path" --bind -o ro "$path"
        elif [[ -f $path ]]; then
            copy_into "$root" "$path"
        fi
    done < <(named_paths)
}

enter() {
    local command=$1 started=$SECONDS rc=0
    local -a variables
    mapfile -d '' -t variables < <(host_variables)
    say "3/4 cloning $(git rev-parse --short HEAD)"
    git clone --quiet --no-hardlinks . "$root/root/tandem"
    git -C "$root/root/tandem" remote remove origin
    say "4/4 inside: $command"
    chroot "$root" /usr/bin/env -i HOME=/root LANG=C.UTF-8 \
        PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
        ${variables[@]+"${variables[@]}"} \
        bash -c "cd /root/tandem && $command" </dev/null || rc=$?
    if [[ $rc -eq 0 ]]; then
        say "ok, $((SECONDS - started)) s"
    else
        say "FAILED with exit code $rc after $((SECONDS - started)) s"
    fi
    return "$rc"
}

if [[ $(id -u) -ne 0 ]]; then
    fail 'needs root: it mounts file systems and changes its root'
fi
if [[ ${1:-} != --inside ]]; then
    if ! command -v mmdebstrap >/dev/null; then
        deploy/setup.sh --only mmdebstrap
    fi
    # Mounts and processes of a name space end with it, however this script ends.
    exec unshare --mount --propagation private --pid --fork --kill-child --mount-proc \
        "$BASH" "./deploy/$(basename "${BASH_SOURCE[0]}")" --inside "$@"
fi
shift
mkdir -p build
work=$(mktemp -d "${TMPDIR:-$PWD/build}/cleanroom.XXXXXX")
root=$work/root
trap finish EXIT
trap 'exit 130' INT TERM HUP
say "1/4 minimal Debian $SUITE (${INCLUDE//,/ })"
make_debian "$root" "$INCLUDE" "$work/log"
bring_host_settings
enter "${1:-$DEFAULT_COMMAND}"
