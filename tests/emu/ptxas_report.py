#!/usr/bin/env python3
"""What ptxas -v has said of the kernels, as the table in common/model/cuda/DESIGN.md: registers, spills
and stack in bytes, and how many blocks and warps a multiprocessor holds. Exit code 1 where a kernel spills.

usage: ptxas_report.py LOG...
"""
import collections
import re
import sys

ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_(\d+)'")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
REGISTERS = 65536  # of a multiprocessor
WARPS_MAX = 64
SHARED = {"80": 164 << 10, "90": 228 << 10, "100": 228 << 10}
SHARED_OF_BLOCK = 1 << 10  # that the system takes

Use = collections.namedtuple("Use", "registers stack spills")


def read(paths):
    """{kernel: {architecture: Use}}"""
    kernels = collections.defaultdict(dict)
    name = arch = frame = None
    for path in paths:
        with open(path, encoding="utf-8") as file:
            for line in file:
                if match := ENTRY.search(line):
                    name, arch = match.groups()
                elif match := FRAME.search(line):
                    frame = [int(x) for x in match.groups()]
                elif (match := USED.search(line)) and name is not None:
                    kernels[name][arch] = Use(int(match.group(1)), frame[0], frame[1] + frame[2])
                    name = None
    return kernels


def shape(name):
    """(threads, dynamic shared bytes) of a kernel's block, as td_cuda_launch.c has them."""
    if match := re.match(r"td_cuda_attention_(few|many)_(\d+)", name):
        dim = int(match.group(2))
        queries, threads = (8, 128) if match.group(1) == "few" else (32, 256)
        return threads, 4 * (32 * (dim + 4) + 32 * dim + queries * dim + queries * 32 + queries * 6)
    if match := re.match(r"td_cuda_product_(\w+)_(few|many)", name):
        form, size = match.groups()
        rows, warps, stages = (8, 1, 6) if size == "few" else (64, 4, 2)
        if form in ("nibble8", "nibble16", "byte"):
            stage = warps * 4 * (544 if form == "byte" else 320)
            stage += (1 if form == "nibble8" else 2) * rows * 144 + 2 * rows * 16
        else:
            stage = warps * 32 * 16 * (4 if form == "f32" else 2) + rows * 32 * 4
        return warps * 32, stages * stage
    return (256, 0) if name == "td_cuda_draw" else (128, 4 * 4096 if name == "td_cuda_norm" else 0)


def blocks(use, threads, shared, arch):
    warps = threads // 32
    registers = (use.registers + 7) // 8 * 8 * 32 * warps
    of_registers = REGISTERS // registers
    of_shared = SHARED[arch] // (shared + SHARED_OF_BLOCK)
    return min(of_registers, of_shared, WARPS_MAX // warps, 32)


def main():
    kernels = read(sys.argv[1:])
    spilled = []
    print("| kernel | threads | shared | registers sm_80 / 90 / 100 | spills | blocks, warps of sm_90 |")
    print("|---|---|---|---|---|---|")
    for name in sorted(kernels):
        uses = kernels[name]
        threads, shared = shape(name)
        spills = sum(use.spills for use in uses.values())
        if spills:
            spilled.append(name)
        held = blocks(uses["90"], threads, shared, "90")
        registers = " / ".join(str(uses[arch].registers) for arch in SHARED)
        print(f"| {name[len('td_cuda_'):]} | {threads} | {shared} | {registers} | {spills} | "
              f"{held}, {held * threads // 32} |")
    if spilled:
        print(f"spills: {', '.join(spilled)}")
    return 1 if spilled or not kernels else 0


if __name__ == "__main__":
    sys.exit(main())
