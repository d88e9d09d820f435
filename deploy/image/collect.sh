#!/usr/bin/env bash
# Makes ROOT the root file system of an image: these programs in /usr/bin, what they load, and the few
# files that libraries look for. Of each package it names the version (/var/lib/dpkg/status.d, which
# scanners read) and has the licence. Runs in the stage of an image that builds.
#
# usage: deploy/image/collect.sh [--rdma] ROOT PROGRAM...
#   --rdma  also what speaks to RDMA adapters (Debian's package ibverbs-providers)
set -euo pipefail

NAME=tandem
ID=65532
rdma=0
if [[ ${1:-} == --rdma ]]; then
    rdma=1
    shift
fi
[[ $# -ge 2 ]] || {
    sed -n 's/^# \(usage.*\)/\1/p; s/^#\(   --.*\)/\1/p' "$0" >&2
    exit 2
}
root=$1
shift
declare -A taken=()    # files of this system that are in ROOT
declare -A packages=() # that they belong to

fail() {
    printf 'collect: error: %s\n' "$*" >&2
    exit 1
}

# Debian has merged /lib into /usr/lib, its packages' lists of files have not.
note_package() { # FILE
    local path line
    for path in "$1" "${1#/usr}"; do
        if line=$(dpkg-query -S "$path" 2>/dev/null); then
            packages[${line%%:*}]=1
            return
        fi
    done
    fail "$1 belongs to no package"
}

take_library() { # FILE: under its own name, the one that is asked for, and as a file of its own
    local path
    path=$(cd "$(dirname "$1")" && pwd -P)/$(basename "$1")
    [[ -z ${taken[$path]:-} ]] || return 0
    taken[$path]=1
    mkdir -p "$root$(dirname "$path")"
    cp -L --preserve=mode "$path" "$root$path"
    note_package "$path"
}

take_libraries_of() { # FILE
    local listed line
    listed=$(ldd "$1" 2>&1) || [[ $listed == *'not a dynamic executable'* ]] || fail "$1: $listed"
    [[ $listed != *'not found'* ]] || fail "$1: $listed"
    while IFS= read -r line; do
        take_library "$line"
    done < <(sed -n 's/^.*=> \(\/[^ ]*\) .*$/\1/p; s/^[[:space:]]*\(\/[^ ]*\) .*$/\1/p' <<<"$listed")
}

# UCX looks for its transports in the folder ucx beside itself, so ldd shows none of them.
take_plugins() {
    local library plugin
    for library in "${!taken[@]}"; do
        [[ $library == */libucs.so.* ]] || continue
        for plugin in "$(dirname "$library")"/ucx/*."${library##*/libucs.}"; do
            [[ -e $plugin ]] || fail "no plug-ins beside $library"
            take_library "$plugin"
            take_libraries_of "$plugin"
        done
    done
}

# libibverbs reads which there are from a folder of files, one line each: "driver NAME", which is
# libNAME-rdmavVERSION.so in a folder of its own.
take_providers() {
    local file name provider
    for file in /etc/libibverbs.d/*.driver; do
        name=$(sed -n 's/^driver //p' "$file")
        for provider in /usr/lib/*/libibverbs/lib"$name"-rdmav*.so; do
            [[ -e $provider ]] || fail "no provider $name: --rdma needs the package ibverbs-providers"
            take_library "$provider"
            take_libraries_of "$provider"
        done
        install -D -m 0644 "$file" "$root$file"
    done
}

take_program() { # FILE
    local place
    place=$root/usr/bin/$(basename "$1")
    install -D -m 0755 "$1" "$place"
    if [[ $1 == /usr/* ]]; then
        note_package "$1"
    else
        strip "$place"
    fi
    take_libraries_of "$1"
}

write_accounts() {
    mkdir -p "$root/etc"
    printf '%s\n' 'root:x:0:0:root:/:/sbin/nologin' "$NAME:x:$ID:$ID:$NAME:/:/sbin/nologin" \
        >"$root/etc/passwd"
    printf '%s\n' root:x:0: "$NAME:x:$ID:" >"$root/etc/group"
    # Without it a name is asked of DNS before it is looked for in /etc/hosts.
    printf '%s\n' 'passwd: files' 'group: files' 'hosts: files dns' >"$root/etc/nsswitch.conf"
}

# From the package itself: /etc/ssl/certs may have more, of the machine that builds.
write_certificates() {
    local bundle=$root/etc/ssl/certs/ca-certificates.crt
    mkdir -p "${bundle%/*}"
    cat /usr/share/ca-certificates/mozilla/*.crt >"$bundle"
    packages[ca-certificates]=1
}

write_packages() {
    local package
    mkdir -p "$root/var/lib/dpkg/status.d"
    for package in "${!packages[@]}"; do
        dpkg-query -s "$package" >"$root/var/lib/dpkg/status.d/$package"
        if [[ -f /usr/share/doc/$package/copyright ]]; then # some bases leave out what is a link
            install -D -m 0644 "/usr/share/doc/$package/copyright" \
                "$root/usr/share/doc/$package/copyright"
        fi
    done
    install -D -m 0644 /usr/lib/os-release "$root/usr/lib/os-release"
    ln -sf ../usr/lib/os-release "$root/etc/os-release"
}

mkdir -p "$root"
for folder in bin lib lib64 sbin; do
    if [[ -d /usr/$folder ]]; then
        mkdir -p "$root/usr/$folder"
        ln -sfn "usr/$folder" "$root/$folder"
    fi
done
for program in "$@"; do
    take_program "$program"
done
take_plugins
[[ $rdma -eq 0 ]] || take_providers
write_accounts
write_certificates
write_packages
install -d -m 1777 "$root/tmp"
# Where file systems are mounted on a root that can't be written to.
mkdir -p "$root"/{dev,proc,sys,run}
printf 'collect: %d programs, %d libraries of %d packages, %s\n' $# "${#taken[@]}" \
    "${#packages[@]}" "$(du -sh "$root" | cut -f1)"
