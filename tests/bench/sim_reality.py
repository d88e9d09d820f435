"""The simulator against reality: a small workload on a real local cluster, and the same in tandem-sim with
what the cluster's router has learned of its nodes. Prints both mean times to first token and their ratio.

    python3 tests/bench/sim_reality.py [--bin build/bin] [--requests 80] [--load 0.5] [--json]

Conversations with a shared beginning, as a trace of 64-token blocks; arrivals are Poisson. A first
workload of the same kind, with other tokens, is what the router learns from. One thread for each node, so
that prefill and decode do not compute on the same CPU."""
import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import Cluster

BLOCK = 64
OUTPUT = 20
FIRST_TOKEN, TOKENS = 1000, 40000  # ordinary ids of the vocabulary


def make_trace(seed, count, rate):
    """Requests of up to 1,500 tokens; a third go on with an earlier one."""
    draw = random.Random(seed)
    trace, now, fresh = [], 0.0, seed * 1000000
    for _ in range(count):
        now += draw.expovariate(rate) * 1000
        blocks = []
        if trace and draw.random() < 0.35:
            blocks = list(draw.choice(trace)["hash_ids"])
        more = draw.randrange(2, 11)
        blocks = (blocks + list(range(fresh, fresh + more)))[:23]
        fresh += more
        tokens = len(blocks) * BLOCK - draw.randrange(0, BLOCK - 2)
        trace.append({"timestamp": round(now), "input_length": tokens, "output_length": OUTPUT,
                      "hash_ids": blocks})
    return trace


def prompt_of(request):
    """A block's tokens are its number's alone, so equal blocks are equal tokens."""
    tokens = []
    for block in request["hash_ids"]:
        draw = random.Random(block)
        tokens += [FIRST_TOKEN + draw.randrange(TOKENS) for _ in range(BLOCK)]
    return tokens[:request["input_length"]]


def replay(c, trace, progress):
    """Sends each request at its time; answers the times to first token, in seconds."""
    prompts = [prompt_of(request) for request in trace]
    times = [None] * len(trace)
    began = time.monotonic() + 0.2

    def one(i):
        due = began + trace[i]["timestamp"] / 1000
        time.sleep(max(0.0, due - time.monotonic()))
        with c.complete(prompts[i], stream=True, max_tokens=OUTPUT, ignore_eos=True, temperature=0,
                        speculation={"drafter": "none"}) as stream:
            next(iter(stream))
            times[i] = time.monotonic() - due
            for _ in stream:
                pass
        if sys.stderr.isatty():
            print(f"\r{progress}: {sum(t is not None for t in times)} of {len(trace)} ", end="",
                  file=sys.stderr)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(trace))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return times


def mean_service_s(c, seed):
    """What a prompt of the workload takes alone, about."""
    prompts = [prompt_of(request) for request in make_trace(seed, 12, 1.0)]
    began = time.monotonic()
    for prompt in prompts:
        c.complete(prompt, max_tokens=1, temperature=0)
    return (time.monotonic() - began) / len(prompts)


def calibration(c, bin_folder, path):
    told = subprocess.run([os.path.join(bin_folder, "tandemctl"), "--keys",
                           os.path.join(c.run_dir, "admin"), "calibration", "--json"],
                          stdout=subprocess.PIPE, check=True).stdout
    with open(path, "wb") as file:
        file.write(told)
    return json.loads(told)


def simulate(bin_folder, trace_path, calibration_path, cache_tokens):
    command = [os.path.join(bin_folder, "tandem-sim"), "--trace", trace_path, "--calibration",
               calibration_path, "--prefill", "1", "--decode", "1", "--block-tokens", str(BLOCK),
               "--node-cache-tokens", str(cache_tokens), "--json"]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bin", default="build/bin")
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--load", type=float, default=0.5, help="share of the time that prefill is busy")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, \
            Cluster(options.bin, kvstore=0, threads=1, kv_memory="1G") as c:
        mean_service_s(c, 97)  # warm
        rate = options.load / mean_service_s(c, 98)
        replay(c, make_trace(1, options.requests, rate), "learning")
        paths = [os.path.join(folder, name) for name in ("trace.jsonl", "calibration.json")]
        told = calibration(c, options.bin, paths[1])
        trace = make_trace(2, options.requests, rate)
        with open(paths[0], "w", encoding="ascii") as file:
            file.writelines(json.dumps(request) + "\n" for request in trace)
        real = replay(c, trace, "measuring")
        simulated = simulate(options.bin, *paths, cache_tokens=40000)
    figures = {"requests": options.requests, "rate_rps": rate,
               "real_ttft_mean_s": statistics.mean(real),
               "real_ttft_p90_s": statistics.quantiles(real, n=10)[-1],
               "sim_ttft_mean_s": simulated["ttft_mean_s"],
               "sim_ttft_p90_s": simulated["ttft_p90_s"],
               "sim_over_real": simulated["ttft_mean_s"] / statistics.mean(real),
               "calibration": told}
    if options.json:
        print(json.dumps(figures))
        return
    print(f"\n{'':14}{'real':>10}{'simulated':>12}{'ratio':>8}")
    for name in ("mean", "p90"):
        a, b = figures[f"real_ttft_{name}_s"], figures[f"sim_ttft_{name}_s"]
        print(f"TTFT {name:<9}{a * 1000:8.1f} ms{b * 1000:9.1f} ms{b / a:8.3f}")


if __name__ == "__main__":
    main()
