#!/usr/bin/env bash
# Fetches the CUDA runtime's headers (2.4 MB) from the Python package index into build/cuda-headers,
# once, for machines without nvcc: the tests of the GPU backend are compiled against them. Never fails:
# without them those tests are skipped, and counted.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PACKAGES=('nvidia-cuda-runtime==13.0.96' 'nvidia-cuda-crt==13.0.88')
DIR='build/cuda-headers'
DOWNLOAD="$DIR.download"

say() { printf 'cuda headers: %s\n' "$*"; }

if command -v nvcc >/dev/null || [[ -x /usr/local/cuda/bin/nvcc || -f $DIR/cuda_runtime_api.h ]]; then
    exit 0
fi
rm -rf "$DOWNLOAD"
mkdir -p "$DOWNLOAD"
say "downloading ${PACKAGES[*]} with pip"
if ! python3 -m pip download --no-deps --disable-pip-version-check -q -d "$DOWNLOAD" \
    "${PACKAGES[@]}" >"$DOWNLOAD/pip.log" 2>&1; then
    tail -n 4 "$DOWNLOAD/pip.log" >&2
    say 'the download failed (above): the tests of the GPU backend will be skipped'
    rm -rf "$DOWNLOAD"
    exit 0
fi
python3 - "$DOWNLOAD" <<'PYTHON'
import glob, os, sys, zipfile

folder = sys.argv[1]
for wheel in glob.glob(os.path.join(folder, "*.whl")):
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            _, found, rest = name.partition("/include/")
            if found and not name.endswith("/"):
                path = os.path.join(folder, "include", rest)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "wb") as out:
                    out.write(archive.read(name))
PYTHON
rm -rf "$DIR"
mv "$DOWNLOAD/include" "$DIR"
rm -rf "$DOWNLOAD"
say "in $DIR"
