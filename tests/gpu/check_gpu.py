#!/usr/bin/env python3
"""What only a machine with a CUDA device can show: the kernel tests on it, the reference's text, clusters
whose nodes share it, and the vendor's checker. Run from the repository root, by make check-gpu.

One line for each item; what cannot run says why. The last line is "N passed, N failed, N skipped"; exit
code 1 on a failure. Where there is no device everything is skipped.
"""
import glob
import os
import shutil
import sys

from gpu import GPU, ROOT, describe, run, why_not

CHECKER_TOOLS = ("memcheck", "racecheck", "synccheck")
CHECKER_TESTS = ("products", "rows", "gather", "attention", "draw")
NO_NCCL, REFUSED = 4, 5  # of gpu_nccl


class Items:
    def __init__(self):
        self.counts = {"OK": 0, "FAILED": 0, "SKIPPED": 0}

    def say(self, kind, name, detail=""):
        self.counts[kind] += 1
        print(f"[{kind:^10}] {name}" + (f": {detail}" if detail else ""), flush=True)

    def command(self, name, command, limit_s=600, **environment):
        code, output = run(command, limit_s, **environment)
        if code == 0:
            self.say("OK", name)
        else:
            self.say("FAILED", name, f"exit code {code}")
            print(output[-4000:])


def check_kernels(items):
    for path in sorted(glob.glob(f"{GPU}/tests/unit/cuda/test_cuda_*")):
        if os.access(path, os.X_OK) and not path.endswith((".o", ".d")):
            items.command(f"on the device: {os.path.basename(path)}", [path])


def check_text(items):
    for precision in ("mixed", "exact"):
        items.command(f"the reference's text, {precision}",
                      [sys.executable, "tests/e2e/reference.py", "--bin", "build/bin", "--precision",
                       precision, "--backend", "cuda"])


def check_clusters(items):
    items.command("clusters: device for CPU, CPU for device, two nodes on one device, several for one model",
                  [sys.executable, "tests/emu/test_cluster_cuda.py", "--bin", "build/bin"],
                  TANDEM_GPU="1")


def check_nccl(items):
    code, output = run([f"{GPU}/gpu_nccl"], 300)
    if code == NO_NCCL:
        items.say("SKIPPED", "NCCL", "libnccl.so.2 was not found, or Tandem was built without nccl.h")
    elif code in (0, REFUSED):
        items.say("OK", "NCCL: blocks gathered, and brought back")
        if code == 0:
            items.say("OK", "NCCL: blocks sent and received", output.strip().splitlines()[-1])
        else:
            items.say("SKIPPED", "NCCL: blocks sent and received",
                      "one device, and NCCL refuses two ranks on it")
    else:
        items.say("FAILED", "NCCL", f"exit code {code}")
        print(output[-4000:])


def check_vendor(items):
    checker = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not os.path.exists(checker):
        items.say("SKIPPED", "compute-sanitizer", "not installed")
        return
    for tool in CHECKER_TOOLS:
        for test in CHECKER_TESTS:
            items.command(f"compute-sanitizer {tool}: {test}",
                          [checker, "--tool", tool, "--error-exitcode", "9",
                           f"{GPU}/tests/unit/cuda/test_cuda_{test}"], 1800)


def main():
    os.chdir(ROOT)
    items = Items()
    why = why_not()
    checks = (("kernels on the device", check_kernels), ("the reference's text", check_text),
              ("clusters on the device", check_clusters), ("NCCL", check_nccl),
              ("compute-sanitizer", check_vendor))
    if why is None:
        print(f"device: {describe()}")
    for name, check in checks:
        if why is not None:
            items.say("SKIPPED", name, why)
        else:
            check(items)
    print(f"{items.counts['OK']} passed, {items.counts['FAILED']} failed, "
          f"{items.counts['SKIPPED']} skipped")
    return 1 if items.counts["FAILED"] else 0


if __name__ == "__main__":
    sys.exit(main())
