#!/usr/bin/env bash
# buildah whose images, containers, caches and temporary files are all in STORAGE.
#
# usage: deploy/image/buildah.sh STORAGE DRIVER ARGUMENTS...
set -euo pipefail
storage=$1 driver=$2
shift 2
mkdir -p "$storage/tmp" "$storage"/{lib,cache} /var/lib/containers /var/cache/containers
export TMPDIR=$storage/tmp
# Two of its caches are where they are: there it finds others, in a mount namespace of its own.
# shellcheck disable=SC2016 # they are the inner shell's
exec unshare --mount --propagation private sh -c '
    mount --bind "$0/lib" /var/lib/containers
    mount --bind "$0/cache" /var/cache/containers
    exec buildah --root "$0/root" --runroot "$0/run" --storage-driver "$@"
' "$storage" "$driver" "$@"
