#!/usr/bin/env python3
"""Checks who includes whom: reads the #include lines of every C file and fails on anything outside
the rules below (tests/DESIGN.md, "Layers"). Prints one line for each breach; exit code 1 if any."""
import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
TOP = ("common", "kvstore", "router", "prefill_node", "decode_node", "tests")
PROGRAMS = ("kvstore", "router", "prefill_node", "decode_node")
STORE_FACES = ("kvstore/kvs_client.h", "kvstore/kvs_donor.h")
CUDA = re.compile(r"^(cuda|cublas|nvrtc|driver_types|cooperative_groups|mma\.h)")

CUDA_FOLDERS = ("common/model/cuda", "tests/emu", "tests/gpu", "tests/unit/cuda")

# Folders of this project (without their own) whose headers a folder may include.
COMMON = {
    "common/base": (),
    "common/trace": ("common/base",),
    "common/wire": ("common/base", "common/kv", "common/trace"),
    "common/transfer": ("common/base", "common/kv"),
    "common/kv": ("common/base",),
    "common/model": ("common/base", "common/kv"),
    "common/spec": ("common/base", "common/kv"),
    "common/coord": ("common/base",),
    "common/node": ("common",),
}


def c_files():
    for top in TOP:
        for folder, dirs, names in os.walk(os.path.join(ROOT, top)):
            dirs.sort()
            for name in sorted(names):
                if name.endswith((".c", ".h", ".cc", ".cu", ".cuh")):
                    yield os.path.relpath(os.path.join(folder, name), ROOT)


def module_of(path):
    """The folder that the rules speak of: common/model for common/model/cpu/x.c."""
    parts = path.split("/")
    return "/".join(parts[:2]) if parts[0] == "common" else parts[0]


def is_below(path, folder):
    return path.startswith(folder + "/")


def project_breach(path, header):
    """Why path may not include this project's header, or None."""
    module = module_of(path)
    if header.endswith("_internal.h") and module != "tests":
        if module_of(header) != module:
            return "an internal header of another folder"
    if module == "tests" or is_below(header, module) or header == os.path.basename(header):
        return None
    if module in PROGRAMS:
        allowed = is_below(header, "common") or header in STORE_FACES
        return None if allowed else f"{module} may include common/ and {', '.join(STORE_FACES)} only"
    allowed = COMMON.get(module)
    if allowed is None:
        return f"{module} is not a folder that the rules know"
    if any(is_below(header, folder) for folder in allowed):
        return None
    return f"{module} may include {', '.join(allowed) or 'nothing'} only"


def breach(path, bracket, header):
    if header.endswith(".pb-c.h") or header.startswith("protobuf-c/"):
        return None if path.endswith("_wire.c") else "protobuf-c belongs into *_wire.c"
    if CUDA.match(os.path.basename(header)) and bracket == "<":
        return (None if any(is_below(path, folder) for folder in CUDA_FOLDERS) else
                "the CUDA runtime belongs into common/model/cuda")
    if header.startswith("nccl"):
        return (None if path.startswith("common/model/cuda/td_cuda_nccl") else
                "NCCL belongs into common/model/cuda/td_cuda_nccl.h")
    if bracket == '"' and header.split("/")[0] in TOP + ("proto",):
        return project_breach(path, header)
    if bracket == '"' and "/" in header:
        return "a path from the repository's root is expected"
    if bracket == '"' and not is_below(path, "tests"):
        return "a path from the repository's root is expected"
    return None


def main():
    breaches = []
    modules = set()
    count = 0
    for path in c_files():
        count += 1
        modules.add(module_of(path))
        with open(os.path.join(ROOT, path), encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                match = INCLUDE.match(line)
                why = breach(path, *match.groups()) if match else None
                if why is not None:
                    breaches.append(f"{path}:{number}: {match.group(2)}: {why}")
    for module in sorted(modules):
        if not os.path.exists(os.path.join(ROOT, module, "DESIGN.md")):
            breaches.append(f"{module}: has C files but no DESIGN.md")
    for line in breaches:
        print(f"check-layers: {line}")
    if count == 0:
        print("check-layers: no C files found")
        return 1
    print(f"check-layers: {count} files, {len(breaches)} breaches")
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
