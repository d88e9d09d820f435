#!/usr/bin/env python3
"""Runs the kernels in the build that tells ThreadSanitizer about the device's threads. Run from the
repository root, after the tests are built."""
import argparse
import os
import subprocess
import sys

GROUPS = ("products", "rows", "attention", "blocks")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bin", default="build/test/bin", help="where emu_race was built")
    args = parser.parse_args()
    program = os.path.join(args.bin, "emu_race")
    if not os.path.exists(program):
        print("[  SKIPPED ] races: not built (sanitizers, no clang++ or no CUDA headers)")
        return 0
    failed = 0
    for group in GROUPS:
        done = subprocess.run([program, group], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              check=False)
        output = done.stdout.decode(errors="replace")
        fine = done.returncode == 0 and f"{group}: no race" in output
        failed += not fine
        print(f"[       OK ] {group} have no race" if fine else
              f"[  FAILED  ] {group} have no race\n{output[:6000]}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
