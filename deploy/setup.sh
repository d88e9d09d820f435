#!/usr/bin/env bash
# Installs what building and testing Tandem needs on Debian 12, and further packages that are named.
# Does nothing, and touches no network, when all of it is there.
#
# usage: deploy/setup.sh [--programs | --only] [PACKAGE...]
#   --programs  what compiling the programs needs, nothing for tests
#   --only      nothing but the packages that are named
set -euo pipefail

PACKAGES=(gcc make pkg-config protobuf-compiler protobuf-c-compiler libprotobuf-c-dev libucx-dev
    libzmq3-dev libsodium-dev libmicrohttpd-dev libgnutls28-dev libjansson-dev libpcre2-dev libutf8proc-dev libcyaml-dev
    libyaml-dev libxxhash-dev liburing-dev liblmdb-dev libcurl4-openssl-dev)
TEST_PACKAGES=(libcmocka-dev etcd-server python3 python3-pip python3-venv procps iproute2 openssl
    ca-certificates curl)
# Oldest versions that Tandem is tested with: those of Debian 12.
MINIMUMS=(ucx:1.13 libzmq:4.3 libprotobuf-c:1.4 libsodium:1.0.18 libmicrohttpd:0.9.75 gnutls:3.7 jansson:2.14
    libpcre2-8:10.40 libutf8proc:2.6 libcyaml:1.3 yaml-0.1:0.2 libxxhash:0.8
    liburing:2.3 lmdb:0.9.24 libcurl:7.88)
TEST_MINIMUMS=(cmocka:1.1.5)

say() { printf 'setup: %s\n' "$*"; }
fail() {
    printf 'setup: error: %s\n' "$*" >&2
    exit 1
}

OLDEST_ETCD=3.4

missing_packages() {
    local package
    for package in "${PACKAGES[@]}"; do
        # shellcheck disable=SC2016 # ${Status} is dpkg-query's
        if [[ $(dpkg-query -W -f '${Status}' "$package" 2>/dev/null) != 'install ok installed' ]]; then
            printf '%s\n' "$package"
        fi
    done
}

check_versions() {
    local pair name least got bad=0
    for pair in "${MINIMUMS[@]}"; do
        name=${pair%%:*}
        least=${pair#*:}
        if ! pkg-config --atleast-version="$least" "$name"; then
            got=$(pkg-config --modversion "$name" 2>/dev/null) || got='none that pkg-config finds'
            printf 'setup: error: %s %s or newer is needed, found: %s\n' "$name" "$least" "$got" >&2
            bad=1
        fi
    done
    [[ $with_tests -eq 1 ]] || return "$bad"
    got=$(etcd --version 2>/dev/null | sed -n 's/^etcd Version: //p') || got=''
    if [[ $(printf '%s\n' "$OLDEST_ETCD" "$got" | sort -V | head -n 1) != "$OLDEST_ETCD" ]]; then
        printf 'setup: error: etcd %s or newer is needed, found: %s\n' "$OLDEST_ETCD" "${got:-none}" >&2
        bad=1
    fi
    return "$bad"
}

# Debian's packages start their daemons. Tandem starts an etcd of its own where it wants one, and of
# prometheus only its checker is used, so none is started by the installation, nor with the machine.
POLICY=/usr/sbin/policy-rc.d
forbidden=0 # whether POLICY is ours
forbid_services() {
    if [[ ! -e $POLICY ]]; then
        printf '#!/bin/sh\nexit 101\n' >"$POLICY"
        chmod 0755 "$POLICY"
        forbidden=1
    fi
}
allow_services() {
    [[ $forbidden -eq 0 ]] || rm -f "$POLICY"
    forbidden=0
}

install_packages() {
    local apt_line="apt-get install -y --no-install-recommends $*" log package
    local -a daemons=() # that come with these packages
    if [[ $(id -u) -ne 0 ]]; then
        fail "missing packages, and only root can install them. Run as root:
    apt-get update && $apt_line"
    fi
    log=$(mktemp)
    # shellcheck disable=SC2064 # the name is known now
    trap "rm -f '$log'; allow_services" EXIT
    for package in "$@"; do
        case $package in
        etcd-server) daemons+=(etcd) ;;
        prometheus) daemons+=(prometheus) ;;
        esac
    done
    say "installing $#: $*"
    say '1/2 apt-get update'
    if ! apt-get update >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        fail 'apt-get update failed (above): are the package sources in /etc/apt reachable?'
    fi
    say "2/2 $apt_line"
    [[ ${#daemons[@]} -eq 0 ]] || forbid_services
    if ! DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@" \
        >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        fail 'apt-get install failed (above)'
    fi
    allow_services
    if [[ ${#daemons[@]} -gt 0 && -d /run/systemd/system ]]; then
        systemctl disable --now "${daemons[@]}" >/dev/null 2>&1 || true
    fi
    say 'packages installed'
}

main() {
    local -a missing
    local with_tests=1
    case ${1:-} in
    --programs) with_tests=0 ;;
    --only) with_tests=0 PACKAGES=() MINIMUMS=() ;;
    -*) fail "unknown option '$1'" ;;
    *) set -- all "$@" ;;
    esac
    shift
    if [[ $with_tests -eq 1 ]]; then
        PACKAGES+=("${TEST_PACKAGES[@]}")
        MINIMUMS+=("${TEST_MINIMUMS[@]}")
    fi
    PACKAGES+=("$@")
    if ! command -v dpkg-query >/dev/null; then
        fail "this script knows Debian only. Install with your system's tools: ${PACKAGES[*]}"
    fi
    mapfile -t missing < <(missing_packages)
    if [[ ${#missing[@]} -gt 0 ]]; then
        install_packages "${missing[@]}"
    fi
    check_versions || fail 'libraries too old (above): Debian 12 or newer has what is needed'
    say "ok, ${#PACKAGES[@]} packages present"
}

main "$@"
