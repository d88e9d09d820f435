# shellcheck shell=bash
# A minimal Debian root that reaches the world as this machine does: for the clean room and for images.
# To be sourced.

SUITE=bookworm
BUNDLE=/etc/ssl/certs/ca-certificates.crt

# Sources of apt, both forms.
apt_sources() {
    local file
    for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.list \
        /etc/apt/sources.list.d/*.sources; do
        if [[ -s $file ]]; then
            printf '%s\n' "$file"
        fi
    done
}

apt_keys() {
    local file
    # Paths after Signed-By: (deb822) and signed-by= (one line).
    apt_sources | while IFS= read -r file; do
        sed -n 's/^[Ss]igned-[Bb]y:\(.*\)$/\1/p; s/.*\[[^]]*signed-by=\([^] ]*\).*/\1/p' "$file"
    done | tr ' ,' '\n' | grep '^/' || true
    find /etc/apt/trusted.gpg.d /etc/apt/keyrings -type f 2>/dev/null || true
}

# How apt reaches the world, as lines of apt.conf.
apt_transport() { apt-config dump | grep -E '^Acquire::(http|https|ftp)::' || true; }

copy_into() { # ROOT FILE: to the same place, followed if it is a link
    mkdir -p "$1$(dirname "$2")"
    cp -rL "$2" "$1$2"
}

# With this machine's package sources, where it is of this SUITE, else mmdebstrap's own.
make_debian() { # ROOT PACKAGES,WITH,COMMAS LOG
    local root=$1 include=$2 log=$3 line
    local -a sources options=()
    mapfile -t sources < <(apt_sources)
    if [[ ${#sources[@]} -eq 0 ]] || ! grep -q "VERSION_CODENAME=$SUITE" /etc/os-release; then
        sources=()
    fi
    while IFS= read -r line; do
        options+=("--aptopt=${line%;}")
    done < <(apt_transport)
    if ! mmdebstrap --variant=minbase --mode=root --quiet --include="$include" \
        ${options[@]+"${options[@]}"} "$SUITE" "$root" ${sources[@]+"${sources[@]}"} \
        >"$log" 2>&1 </dev/null; then
        tail -n 20 "$log" >&2
        printf 'error: mmdebstrap failed (above)\n' >&2
        return 1
    fi
    if [[ ${#sources[@]} -gt 0 ]]; then
        rm -f "$root"/etc/apt/sources.list "$root"/etc/apt/sources.list.d/*
        for line in "${sources[@]}"; do copy_into "$root" "$line"; done
        while IFS= read -r line; do copy_into "$root" "$line"; done < <(apt_keys)
    fi
}

# Authorities that this machine trusts besides.
bring_certificates() { # ROOT LOG
    if compgen -G '/usr/local/share/ca-certificates/*' >/dev/null; then
        cp -rL /usr/local/share/ca-certificates/. "$1/usr/local/share/ca-certificates/"
        chroot "$1" update-ca-certificates >"$2" 2>&1 || cat "$2" >&2
    fi
    [[ ! -f $BUNDLE ]] || copy_into "$1" "$BUNDLE"
}
