#!/usr/bin/env python3
"""Compares tandem-bench eval with the exact answers in tests/data/reference_smollm2.jsonl.

The reference is a textbook forward pass over weights dequantised to fp32; KV codecs are compared with
f16 of the same precision. Prints one line for each check, exits 0 when all hold. Run from the
repository root.
"""
import argparse
import json
import os
import subprocess
import sys

MODEL = "build/models/SmolLM2-135M-Instruct.Q4_1.gguf"
REFERENCE = "tests/data/reference_smollm2.jsonl"
LONG_TEXT = 100  # tokens from which on a mean likelihood is worth comparing
MARGIN = 0.5  # below it the reference's own choice is too close to demand
LIMITS = {  # precision: (argmax agreement in %, mean |NLL difference|, greedy is checked)
    "mixed": (98.5, 0.003, True),
    "exact": (99.9, 0.0005, True),
    "fast": (97.0, 0.01, False),
}
CODEC_LIMITS = {  # the same against f16: (argmax agreement in %, mean |NLL difference|)
    "i8": (97.5, 0.005),
    "f8_e4m3": (95.0, 0.01),
    "f4_e2m1": (75.0, 0.1),
}


def evaluate(binary, precision, isa, kv_codec="f16", backend="cpu"):
    with open(REFERENCE, "rb") as jobs:
        done = subprocess.run(
            [binary, "eval", "--model", MODEL, "--precision", precision, "--isa", isa,
             "--kv-codec", kv_codec, "--backend", backend],
            stdin=jobs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)
    if done.returncode != 0:
        sys.stderr.write(done.stderr.decode(errors="replace"))
        return None
    return [json.loads(line) for line in done.stdout.splitlines()]


def greedy_matches(reference, result):
    """Equal up to the first step at which the reference itself hesitates."""
    for step, (want, margin) in enumerate(zip(reference["greedy"], reference["margin"])):
        if margin < MARGIN:
            return True
        if step >= len(result["greedy"]) or result["greedy"][step] != want:
            return False
    return len(result["greedy"]) == len(reference["greedy"])


def compare(references, results):
    """Agreement at all positions; likelihood over the long texts."""
    same = sum(a == b for ref, res in zip(references, results)
               for a, b in zip(ref["argmax"], res["argmax"]))
    total = sum(len(ref["argmax"]) for ref in references)
    diffs = [res["nll"] - ref["nll"] for ref, res in zip(references, results)
             if len(ref["ids"]) >= LONG_TEXT]
    greedy = [ref["id"] for ref, res in zip(references, results)
              if "margin" in ref and not greedy_matches(ref, res)]
    return {
        "agreement": 100.0 * same / total,
        "nll_mean_abs": sum(abs(d) for d in diffs) / len(diffs),
        "nll_mean": sum(diffs) / len(diffs),
        "nll_worst": max(abs(d) for d in diffs),
        "greedy_wrong": greedy,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bin", default="build/bin", help="folder of tandem-bench")
    parser.add_argument("--precision", nargs="+", default=["mixed", "exact"], choices=LIMITS)
    parser.add_argument("--kv-codec", nargs="*", choices=CODEC_LIMITS,
                        help="compared with f16 at the first precision; default: all, with "
                        "sanitizers none")
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--backend", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    if args.kv_codec is None:
        args.kv_codec = [] if "san-" in args.bin else list(CODEC_LIMITS)
    binary = os.path.join(args.bin, "tandem-bench")
    by_precision = {}
    failed = 0

    def check(name, ok, detail):
        nonlocal failed
        failed += not ok
        print(f"[{'       OK' if ok else '  FAILED '} ] {name}")
        print(f"    {detail}")

    def complete(name, results):
        ok = (results is not None and
              [r["id"] for r in results] == [r["id"] for r in references] and
              all(len(res["argmax"]) == len(ref["argmax"])
                  for ref, res in zip(references, results)))
        check(f"reference_{name}_answers_every_job", ok, f"jobs={len(references)}")
        return ok

    with open(REFERENCE, encoding="utf-8") as file:
        references = [json.loads(line) for line in file]
    for precision in args.precision:
        agreement, nll, wants_greedy = LIMITS[precision]
        results = evaluate(binary, precision, args.isa, backend=args.backend)
        if not complete(precision, results):
            continue
        by_precision[precision] = results
        c = compare(references, results)
        check(f"reference_{precision}_argmax_agreement", c["agreement"] >= agreement,
              f"{c['agreement']:.2f} % (at least {agreement} %)")
        check(f"reference_{precision}_likelihood", c["nll_mean_abs"] <= nll,
              f"mean |difference| {c['nll_mean_abs']:.5f} (at most {nll}), "
              f"mean {c['nll_mean']:+.5f}, worst {c['nll_worst']:.5f}")
        check(f"reference_{precision}_greedy", not (wants_greedy and c["greedy_wrong"]),
              f"differs in: {' '.join(c['greedy_wrong']) or 'none'}")
    for codec in args.kv_codec:
        agreement, nll = CODEC_LIMITS[codec]
        results = evaluate(binary, args.precision[0], args.isa, codec, args.backend)
        if not complete(codec, results) or args.precision[0] not in by_precision:
            continue
        plain = [{**res, "ids": ref["ids"]}
                 for ref, res in zip(references, by_precision[args.precision[0]])]
        c = compare(plain, results)
        check(f"reference_{codec}_argmax_agreement_with_f16", c["agreement"] >= agreement,
              f"{c['agreement']:.2f} % (at least {agreement} %)")
        check(f"reference_{codec}_likelihood_against_f16", 0 < c["nll_mean_abs"] <= nll,
              f"mean |difference| {c['nll_mean_abs']:.5f} (at most {nll}), "
              f"mean {c['nll_mean']:+.5f}, worst {c['nll_worst']:.5f}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
