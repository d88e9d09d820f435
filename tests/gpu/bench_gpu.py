#!/usr/bin/env python3
"""Figures of the CUDA backend on this machine's device, as JSON on standard output. Run from the
repository root, by make bench-gpu. Where there is no device it says why, and prints {"skipped": why}.
"""
import argparse
import json
import os
import sys

from gpu import GPU, ROOT, describe, run, why_not


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="build/models/SmolLM2-135M-Instruct.Q4_1.gguf")
    args = parser.parse_args()
    os.chdir(ROOT)
    why = why_not()
    if why is not None:
        print(f"bench-gpu: skipped, all of it: {why}", file=sys.stderr)
        print(json.dumps({"skipped": why}))
        return 0
    result = {"device": describe(), "model": os.path.basename(args.model)}
    code, output = run([f"{GPU}/gpu_copy"], 300)
    if code != 0:
        print(f"bench-gpu: gpu_copy failed\n{output[-2000:]}", file=sys.stderr)
        return 1
    result["memory"] = json.loads(output)
    code, output = run(["build/bin/tandem-bench", "model", "--model", args.model, "--backend", "cuda",
                        "--json"], 1800)
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if code != 0 or not lines:
        print(f"bench-gpu: tandem-bench failed\n{output[-2000:]}", file=sys.stderr)
        return 1
    result["figures"] = json.loads(lines[-1])
    # A decode step of one sequence reads all weights once; of the file the norms are nothing.
    one = result["figures"].get("decode_b1_tok_s")
    if one:
        gb_s = os.path.getsize(args.model) * one / 1e9
        result["decode_read_gb_s"] = round(gb_s, 1)
        result["decode_read_fraction"] = round(gb_s / result["memory"]["device_memory_gb_s"], 4)
    code, output = run([f"{GPU}/gpu_nccl"], 300)
    if code == 0:
        result["nccl"] = json.loads(output.strip().splitlines()[-1])
    print(json.dumps(result, indent=1))
    if code != 0:
        print("bench-gpu: skipped: NCCL transfers (they take two devices and libnccl.so.2)",
              file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
