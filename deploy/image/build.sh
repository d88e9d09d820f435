#!/usr/bin/env bash
# Makes the images tandem and tandem-etcd on a machine without docker: as OCI archives in build/image.
# The base that they are built in is made here, from this machine's own package sources.
# Everything that buildah keeps is in build/image, too: what is there already is not made again.
#
# usage: deploy/image/build.sh VERSION [--fresh]
#   --fresh  base and packages anew, as they are in the package sources now
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=deploy/debian.sh
. deploy/debian.sh

OUT=$PWD/build/image
LOG=$OUT/log
BASE=localhost/tandem-base

say() { printf 'image: %s\n' "$*"; }
fail() {
    printf 'image: error: %s\n' "$*" >&2
    exit 1
}

logged() { # COMMAND...
    if ! "$@" >>"$LOG" 2>&1 </dev/null; then
        tail -n 30 "$LOG" >&2
        fail "$1 ${2:-} failed (above; all of it is in ${LOG#"$PWD"/})"
    fi
}

# Layers are copies without overlay: slower, and gigabytes.
driver=vfs
pick_driver() {
    local try=$OUT/overlay
    mkdir -p "$try"/{lower,upper,work,merged}
    # shellcheck disable=SC2016 # it is the inner shell's
    if unshare --mount --propagation private sh -c '
        mount -t overlay overlay -o "lowerdir=$0/lower,upperdir=$0/upper,workdir=$0/work" "$0/merged"
    ' "$try" 2>/dev/null; then
        driver=overlay
    fi
    rm -rf --one-file-system "$try"
}

buildah() { deploy/image/buildah.sh "$OUT/storage-$driver" "$driver" "$@"; }

make_base() {
    local container
    rm -rf --one-file-system "$OUT/base"
    make_debian "$OUT/base" ca-certificates "$LOG"
    bring_certificates "$OUT/base" "$LOG.certificates"
    rm -f "$LOG.certificates"
    container=$(buildah from scratch 2>>"$LOG")
    logged buildah add --quiet "$container" "$OUT/base" /
    logged buildah commit --quiet --rm "$container" "$BASE"
    rm -rf --one-file-system "$OUT/base"
}

build() { # NAME DOCKERFILE
    local archive=$OUT/$1-$version.tar
    logged buildah build --isolation chroot --layers --pull-never --timestamp "$timestamp" \
        --build-arg "BASE=$BASE" --build-arg "VERSION=$version" --build-arg "REVISION=$revision" \
        --file "$2" --tag "$1:$version" .
    rm -f "$archive.partial"
    logged buildah push "$1:$version" "oci-archive:$archive.partial:$1:$version"
    rm -f "$OUT/$1"-[0-9]*.tar # of other versions, too
    mv "$archive.partial" "$archive"
}

version=${1:?a version is needed}
[[ $(id -u) -eq 0 ]] || fail 'needs root: it mounts file systems and changes its root'
for tool in buildah mmdebstrap; do
    type -P "$tool" >/dev/null || fail "$tool is needed (deploy/setup.sh --only buildah mmdebstrap)"
done
[[ ${2:-} != --fresh ]] || rm -rf --one-file-system "$OUT"
mkdir -p "$OUT"
: >"$LOG"
pick_driver
# One commit is one image: its layers' times are the commit's.
revision=$(git describe --always --abbrev=40 --dirty --exclude '*' 2>/dev/null) || revision=unknown
timestamp=$(git log -1 --format=%ct 2>/dev/null) || timestamp=$(date +%s)

if [[ -n $(buildah images --quiet --filter "reference=$BASE" 2>/dev/null) ]]; then
    say "1/3 base: Debian $SUITE, made before (--fresh makes it anew)"
else
    say "1/3 base: Debian $SUITE"
    make_base
fi
say "2/3 tandem:$version (1 to 3 minutes)"
build tandem deploy/image/Dockerfile
say "3/3 tandem-etcd:$version"
build tandem-etcd deploy/image/etcd.Dockerfile
for name in tandem tandem-etcd; do
    say "build/image/$name-$version.tar, $(stat -c %s "$OUT/$name-$version.tar" | numfmt --to=si)B compressed"
done
