"""tandem-sim on the head of a public trace: same seed, same figures; policies in the expected order;
bad input is named and refused. Never how fast it is."""
import json
import os
import random
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import REPORT, ROOT, main, test

TRACE = os.path.join(ROOT, "tests/data/conversation_trace_head.jsonl")
POLICIES = ("kv_aware", "local_aware", "least_loaded", "round_robin", "random", "pooled")
KEYS = """policy requests completed rejected failed moved good hit_rate hit_rate_pulled
    hit_rate_infinite load_max_over_mean ttft_mean_s ttft_p90_s tbt_p90_s goodput_rps""".split()
FEW = ("--prefill", 4, "--decode", 2, "--rate-scale", 1.5)


def sim(options, *args, code=0, env=None):
    """Runs tandem-sim; returns (standard output, standard error)."""
    command = [os.path.join(options.bin, "tandem-sim"), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120,
                          env={**os.environ, **(env or {})})
    assert not REPORT.search(done.stderr), done.stderr
    assert done.returncode == code, f"{args}: exit code {done.returncode}\n{done.stderr[-3000:]}"
    return done.stdout, done.stderr


def figures(options, *args):
    out, _ = sim(options, "--trace", TRACE, "--json", *args)
    return json.loads(out)


@test
def test_figures_have_their_names_and_add_up(options):
    for policy in POLICIES:
        r = figures(options, "--policy", policy, *FEW)
        missing = [key for key in KEYS if key not in r]
        assert not missing, f"missing: {missing}"
        assert r["policy"] == policy and r["requests"] == 600
        assert r["completed"] + r["rejected"] + r["failed"] == r["requests"], r
        assert 0 <= r["hit_rate"] <= r["hit_rate_pulled"] <= r["hit_rate_infinite"] < 1, r
        assert 1 <= r["load_max_over_mean"] <= 4, r
        assert 0 < r["ttft_mean_s"] <= r["ttft_p90_s"] * 10, r


@test
def test_the_same_seed_gives_the_same_bytes(options):
    for policy in POLICIES:
        for load in ((), ("--arrivals", "poisson"), ("--fail", "20:p1:60,40:d0")):
            args = ("--trace", TRACE, "--json", "--policy", policy, *FEW, *load, "--seed", 7)
            assert sim(options, *args) == sim(options, *args), args
    seeds = {sim(options, "--trace", TRACE, "--json", "--arrivals", "poisson", "--seed", seed)[0]
             for seed in (1, 2, 3)}
    assert len(seeds) == 3


@test
def test_policies_come_in_their_order(options):
    by = {p: figures(options, "--policy", p, *FEW, "--arrivals", "spread") for p in POLICIES}
    ttft = {p: by[p]["ttft_mean_s"] for p in POLICIES}
    assert ttft["kv_aware"] < ttft["least_loaded"] < ttft["random"], ttft
    assert ttft["local_aware"] < ttft["least_loaded"], ttft
    hits = {p: by[p]["hit_rate"] for p in POLICIES}
    assert hits["pooled"] == by["pooled"]["hit_rate_infinite"], by  # it is large enough
    assert max(hits, key=hits.get) == "pooled", hits
    assert hits["kv_aware"] > hits["local_aware"] > hits["least_loaded"], hits
    for policy in POLICIES:  # only the policy that counts on pulling pulls, without a store
        assert (by[policy]["hit_rate_pulled"] > hits[policy]) == (policy == "kv_aware"), policy
    assert by["kv_aware"]["hit_rate_pulled"] >= 0.98 * hits["pooled"]


@test
def test_early_rejection_keeps_what_is_taken_good(options):
    slo = ("--prefill", 8, "--decode", 1, "--slo-ttft-ms", 30000, "--slo-tbt-ms", 25)
    loaded = figures(options, *slo, "--policy", "least_loaded")
    refused = figures(options, *slo, "--policy", "kv_aware", "--admission")
    assert loaded["rejected"] == 0 and refused["rejected"] > 0
    assert refused["good"] > loaded["good"], (refused, loaded)
    assert refused["good"] / refused["completed"] > 0.8, refused
    assert 1 <= refused["retry_after_mean_s"] <= 60, refused


@test
def test_failures_move_requests_and_lose_caches(options):
    calm = figures(options, *FEW)
    hurt = figures(options, *FEW, "--fail", "30:p0:40,60:d1:70")
    assert calm["moved"] == 0 and hurt["moved"] > 0
    assert hurt["completed"] == hurt["requests"]
    assert hurt["hit_rate"] < calm["hit_rate"]
    gone = figures(options, "--prefill", 1, "--decode", 1, "--fail", "10:d0")
    assert gone["failed"] > 0 and gone["completed"] + gone["failed"] == gone["requests"], gone


@test
def test_tables_sweep_and_plot(options):
    out, _ = sim(options, "--trace", TRACE, "--policy", "all", *FEW)
    for policy in POLICIES:
        assert f"\n{policy} " in out, out
    assert "a cache without end would hit" in out
    with tempfile.TemporaryDirectory() as folder:
        plot = os.path.join(folder, "sweep.gp")
        args = ("--trace", TRACE, "--sweep", "--sweep-prefill", "2:8:2", "--sweep-decode", "1:2",
                "--slo-ttft-ms", 4000, "--slo-tbt-ms", 25, "--plot", plot)
        out, err = sim(options, *args, "--progress", "on")
        assert "rows: prefill nodes" in out and "8/8" in err, (out, err)
        with open(plot, encoding="utf-8") as file:
            text = file.read()
        assert "plot $shares using 1:2" in text and f"{plot}.png" in text, text
        cells = json.loads(sim(options, *args, "--json")[0])["cells"]
        assert len(cells) == 8
        for few, more in zip(cells, cells[2:]):  # of as many decode nodes: more never hurts much
            assert more["share"] >= few["share"] - 0.02, (few, more)
        assert cells[-1]["share"] > cells[0]["share"] + 0.05, cells


@test
def test_a_calibration_changes_what_nodes_are(options):
    base = figures(options, *FEW)["ttft_mean_s"]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "node.json")

        def calibrate(text):
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)

        calibrate('{"prefill_token_us": 56}')
        fast = figures(options, *FEW, "--calibration", path)["ttft_mean_s"]
        assert fast < 0.7 * base, (fast, base)
        again = figures(options, *FEW, "--calibration", path, "--prefill-token-us", 112)
        assert again["ttft_mean_s"] == base  # options count more
        for text, why in (('{"prefill": 3}', "prefill is no parameter"),
                          ('{"layers": "80"}', "layers must be a number"),
                          ('{"layers": 0}', "layers must be a number"),
                          ("[]", "an object is expected"), ("{", "line 1")):
            calibrate(text)
            _, err = sim(options, "--trace", TRACE, "--calibration", path, code=2)
            assert why in err, err


@test
def test_bad_options_are_refused(options):
    for args, why in ((("--policy", "best"), "policy"), (("--rate-scale", "0"), "rate-scale"),
                      (("--rate-scale", "1x"), "rate-scale"), (("--prefill", "0"), "prefill"),
                      (("--fail", "3:p99"), "fail"), (("--fail", "3:x0"), "fail"),
                      (("--fail", "9:p0:3"), "fail"), (("--link-gb-s", "nan"), "link-gb-s"),
                      (("--sweep", "--sweep-prefill", "3:1"), "sweep"), (("--what", "1"), "what")):
        _, err = sim(options, "--trace", TRACE, *args, code=2)
        assert why in err, (args, err)
    slow = ("--requests", 4000000, "--rate-scale", "1e-6")
    assert "more than a hundred years" in sim(options, "--trace", TRACE, *slow, code=2)[1]
    figures(options, "--prefill-token-us", "1e9", "--decode-step-ms", "1e6")  # no time overflows
    assert "--trace FILE is needed" in sim(options, code=2)[1]
    assert "cannot be read" in sim(options, "--trace", "/nowhere/x", code=2)[1]
    json.loads(sim(options, "--json", env={"TANDEM_TRACE": TRACE})[0])  # as all programs do


@test
def test_malformed_traces_name_line_and_field(options):
    good = '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [0]}'
    cases = (("", "no request in it"), (good + "\n{", "line 2: not JSON"),
             (good.replace("5", "null"), "line 1: input_length"),
             (good.replace("[0]", "[0, 1]"), "line 1: hash_ids"),
             (good.replace("[0]", "[-1]"), "line 1: hash_ids[0]"),
             (good.replace(": 0,", ": 3,") + "\n" + good, "line 2: timestamp"),
             (good.replace('"output_length": 1, ', ""), "line 1: output_length is missing"),
             ("\0" * 50, "line 1: not JSON"), ("9" * 5000000, "line 1: longer than"))
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.jsonl")
        for text, why in cases:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
            out, err = sim(options, "--trace", path, code=2)
            assert why in err and path in err and out == "", (text[:80], err)


@test
def test_damaged_traces_never_crash_it(options):
    with open(TRACE, "rb") as file:
        lines = file.read().split(b"\n")[:20]
    rng = random.Random(5)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.jsonl")
        for _ in range(60):
            data = bytearray(b"\n".join(lines))
            for _ in range(rng.choice((1, 3, 30))):
                at = rng.randrange(len(data))
                data[at:at + rng.choice((0, 1, 1, 40))] = bytes([rng.randrange(256)])
            with open(path, "wb") as file:
                file.write(data)
            command = [os.path.join(options.bin, "tandem-sim"), "--trace", path, "--json"]
            done = subprocess.run(command, capture_output=True, check=False, timeout=60)
            assert done.returncode in (0, 2), (done.returncode, done.stderr[-500:])
            assert done.returncode == 0 or b"line " in done.stderr, done.stderr


if __name__ == "__main__":
    main(__doc__)
