"""Heads on the model's hidden state: the tool that trains them, and drafting with them, which changes
how fast an answer comes and not one token of it."""
import atexit
import functools
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import ROOT, Cluster, main, run_together, shared, test
import speculation
from speculation import (COPY, FREE, MODEL_SAMPLINGS as SAMPLINGS, drafted, far_apart, same_in_batches,
                         same_with_endings, sample, wishes_of)

MODEL = os.path.join(ROOT, "build", "models", "SmolLM2-135M-Instruct.Q4_1.gguf")
# Little text and a small network: some seconds, and right a few times in a hundred.
QUICK = ["--tokens", "3072", "--held-out-tokens", "512", "--text-tokens", "64", "--sequences", "32",
         "--epochs", "8", "--hidden", "128", "--shortlist", "1024", "--candidates", "512", "--batch",
         "128", "--steps", "3"]
ask = functools.partial(speculation.ask, max_tokens=24)

folder = tempfile.mkdtemp(prefix="tandem-heads-")
atexit.register(shutil.rmtree, folder, ignore_errors=True)


def train(options, out, *more):
    return subprocess.run([os.path.join(options.bin, "tandem-train-heads"), "--model", MODEL,
                           "--out", out, *QUICK, *more], capture_output=True, text=True,
                          check=False)


def heads(options):
    path = os.path.join(folder, "heads")
    if not os.path.exists(path):
        ended = train(options, path)
        assert ended.returncode == 0, ended.stderr
    return path


def read(path):
    """The header of a tensor file, and what follows it."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(length)), file.read()


def write(path, header, data):
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)
    return path


def echo(options):
    """Heads that add nothing: they draft, of all tokens, what the state says that they begin with,
    and so the newest token once more."""
    path = os.path.join(folder, "echo")
    header = {"__metadata__": read(heads(options))[0]["__metadata__"]}
    data = b""
    for name, dtype, shape in (("in.weight", "F32", [8, 3 * 576]), ("in.bias", "F32", [8]),
                               ("out.weight", "F32", [576, 8]), ("out.bias", "F32", [576]),
                               ("tokens", "I32", [49152])):
        count = functools.reduce(lambda a, b: a * b, shape)
        more = struct.pack(f"<{count}i", *range(count)) if dtype == "I32" else bytes(4 * count)
        header[name] = {"dtype": dtype, "shape": shape,
                        "data_offsets": [len(data), len(data) + len(more)]}
        data += more
    return write(path, header, data)


def cluster(options):
    # Confidence 0 %: a chain is as long as k, and much of it wrong; beside the first places stand
    # second choices.
    return shared(options, router_args=["--allow-placement"],
                  decode_args=["--medusa-heads", heads(options), "--medusa-confidence", "0",
                               "--draft-tree", "all"])


def sides(c, result):
    return c.metrics("decode-1")[f'tandem_decode_draft_side_tokens_total{{result="{result}"}}']


@test
def test_i1_medusa_any_k_gives_the_same_tokens(options):
    c = cluster(options)
    tried = 0
    for prompt in (COPY, FREE):
        for sampling in SAMPLINGS:
            expected, _ = ask(c, prompt, {"drafter": "none"}, **sampling)
            for k in range(0, 9):
                got, details = ask(c, prompt, {"drafter": "medusa", "k": k}, **sampling)
                assert got == expected, (prompt, sampling, k, got, expected)
                tried += drafted(details)
                assert k > 0 or drafted(details) == 0
            got, _ = ask(c, prompt, {"drafter": "medusa"}, **sampling)  # k by its own plan
            assert got == expected, (prompt, sampling, "own k")
    assert tried > 2000, tried
    assert sides(c, "accepted") > 50, sides(c, "accepted")
    c.wait_at_rest(["decode-1"], 10)


@test
def test_trees_are_verified_and_counted(options):
    """Second choices come true, at every offset in a block, and count as what they are: one more
    row of a step, right or wrong."""
    c = cluster(options)
    series = 'tandem_decode_drafter_tokens_total{{drafter="medusa",result="{}"}}'

    def count():
        metrics = c.metrics("decode-1")
        return [metrics[series.format(result)] for result in ("accepted", "rejected")] + [
            sides(c, result) for result in ("accepted", "rejected")]

    right = wrong = 0
    for tokens in range(1, 18):  # prompts whose ends lie anywhere in a block
        prompt = FREE + " And" * tokens
        more = {"max_tokens": 20, "temperature": 0.7 * (tokens % 2), "seed": tokens}
        expected, _ = ask(c, prompt, {"drafter": "none"}, **more)
        before = count()
        got, details = ask(c, prompt, {"drafter": "medusa", "k": 2}, **more)
        assert got == expected, (tokens, got, expected)
        accepted, rejected, side_accepted, side_rejected = (
            now - then for now, then in zip(count(), before))
        assert details["accepted_prediction_tokens"] == accepted, (details, accepted)
        assert details["rejected_prediction_tokens"] == rejected, (details, rejected)
        assert side_accepted <= accepted and side_rejected <= rejected
        assert side_accepted + side_rejected <= 2 * 20
        right += side_accepted
        wrong += side_rejected
    assert right >= 10 and wrong > right, (right, wrong)
    c.wait_at_rest(["decode-1"], 10)


@test
def test_i1_trees_under_a_window_and_of_another_codec(options):
    """Blocks that no later position sees are gone from leaves' tables too; and scales are copied."""
    with Cluster(options.bin, attention="window:64,4", kv_codec="f8_e4m3",
                 router_args=["--allow-placement"],
                 decode_args=["--medusa-heads", heads(options), "--draft-tree", "all"]) as c:
        for temperature in (0, 0.8):
            more = {"max_tokens": 64, "temperature": temperature, "seed": 4}
            expected, _ = ask(c, COPY * 4, {"drafter": "none"}, **more)
            for k in (1, 4):
                got, _ = ask(c, COPY * 4, {"drafter": "medusa", "k": k}, **more)
                assert got == expected, (temperature, k, got, expected)
        assert sides(c, "accepted") > 5, sides(c, "accepted")
        c.wait_at_rest(["decode-1"], 10)


@test
def test_i1_trees_by_the_nodes_own_measure(options):
    """Whatever it finds worth its time, it changes nothing else."""
    with Cluster(options.bin, kvstore=0, router_args=["--allow-placement"],
                 decode_args=["--medusa-heads", heads(options)]) as c:
        jobs = [(prompt, index) for prompt in (COPY, FREE) for index in range(len(SAMPLINGS))]
        expected = {job: ask(c, job[0], {"drafter": "none"}, **SAMPLINGS[job[1]])[0]
                    for job in jobs}

        def run(prompt, index, number):
            got, _ = ask(c, prompt, {"drafter": "medusa"}, **SAMPLINGS[index])
            assert got == expected[(prompt, index)], (prompt[:20], index, number)

        for job in jobs:
            run(*job, "alone")
        run_together([(*job, number) for job in jobs for number in range(3)], run)
        series = 'tandem_decode_drafter_tokens_total{drafter="medusa",result="accepted"}'
        assert c.metrics("decode-1")[series] > 0
        c.wait_at_rest(["decode-1"], 10)


@test
def test_chains_alone_have_no_sides(options):
    with Cluster(options.bin, kvstore=0, router_args=["--allow-placement"],
                 decode_args=["--medusa-heads", heads(options), "--medusa-confidence", "0",
                              "--draft-tree", "off"]) as c:
        _, details = ask(c, FREE, {"drafter": "medusa", "k": 3}, temperature=0)
        assert drafted(details) > 0
        assert sides(c, "accepted") + sides(c, "rejected") == 0


@test
def test_i1_medusa_with_stops_choices_and_minimum(options):
    c = cluster(options)
    same_with_endings(c, ask, ["medusa"])
    c.wait_at_rest(["decode-1"], 10)


@test
def test_i1_batches_with_medusa(options):
    c = cluster(options)
    same_in_batches(c, ask, SAMPLINGS[:4],
                    wishes_of(["none", "prompt_lookup", "early_exit", "medusa"]))
    c.wait_at_rest(["decode-1"], 10)


@test
def test_medusa_drafts_the_same_in_any_batch(options):
    """A chain's numbers don't depend on the others in the pass, so neither does what is accepted."""
    c = cluster(options)
    jobs = [(prompt, index) for prompt in (COPY, FREE) for index in range(len(SAMPLINGS))]
    wish = {"drafter": "medusa", "k": 3}
    alone = {job: ask(c, job[0], wish, **SAMPLINGS[job[1]])[1] for job in jobs}

    def run(prompt, index):
        details = ask(c, prompt, wish, **SAMPLINGS[index])[1]
        assert details == alone[(prompt, index)], (prompt, index, details, alone[(prompt, index)])

    run_together(jobs, run)


@test
def test_rejection_rule_with_medusa_keeps_the_distribution(options):
    c = cluster(options)
    plain, _, _ = sample(c, COPY, {"drafter": "none"}, 64)
    texts, accepted, rejected = sample(c, COPY, {"drafter": "medusa", "k": 3, "rule": "rejection"},
                                       64)
    assert rejected > 50 and accepted > 20, (accepted, rejected)
    apart = far_apart(plain, texts)
    assert apart < 4.5, apart  # by chance three times in a million
    expected, _ = ask(c, COPY, {"drafter": "none"}, temperature=0)
    got, details = ask(c, COPY, {"drafter": "medusa", "k": 4, "rule": "rejection"}, temperature=0)
    assert got == expected and drafted(details) > 0


@test
def test_i1_preempted_with_medusa(options):
    with Cluster(options.bin, kvstore=0,
                 decode_args=["--kv-memory", str(22 * 368640), "--medusa-heads", heads(options),
                              "--medusa-confidence", "0", "--draft-tree", "all"],
                 router_args=["--queue-ms", "60000"]) as c:
        for _ in range(24):  # outputs are short, it learns, and promises little
            c.complete(FREE, max_tokens=4, ignore_eos=True)
        alone = c.complete(COPY, max_tokens=150, temperature=0, ignore_eos=True,
                           speculation={"drafter": "none"}).text

        def run(number, k):
            reply = c.complete(COPY, max_tokens=150, temperature=0, ignore_eos=True,
                               cache_salt=str(number), speculation={"drafter": "medusa", "k": k})
            assert reply.text == alone, (number, k, reply.text, alone)

        run_together([(0, 8), (1, 5), (2, 3), (3, 1)], run)
        assert c.metrics("decode-1")["tandem_decode_preemptions_total"] > 0
        assert sides(c, "accepted") > 0
        c.wait_at_rest(["decode-1"], 10)


def shares(c):
    """Of the first drafts of many steps, how many were right."""
    right = all_of_them = 0
    for number, prompt in enumerate((FREE, "What is gravity?", "A recipe for bread:")):
        details = c.complete(prompt, max_tokens=64, temperature=0, ignore_eos=True,
                             cache_salt=str(number), speculation={"drafter": "medusa", "k": 1}
                             ).usage["completion_tokens_details"]
        right += details["accepted_prediction_tokens"]
        all_of_them += drafted(details)
    return right / all_of_them


@test
def test_training_helps(options):
    """Against heads that add nothing to the state they begin with; and sure ones draft less."""
    trained = shares(cluster(options))
    with Cluster(options.bin, kvstore=0, decode_args=["--medusa-heads", echo(options),
                                                      "--medusa-confidence", "0"]) as c:
        assert shares(c) < trained / 2, trained
    assert trained > 0.1, trained
    counts = []
    for percent in ("0", "95"):
        with Cluster(options.bin, kvstore=0, decode_args=["--medusa-heads", heads(options),
                                                          "--medusa-confidence", percent]) as c:
            counts.append(drafted(c.complete(
                FREE, max_tokens=48, ignore_eos=True, temperature=0,
                speculation={"drafter": "medusa", "k": 4}).usage["completion_tokens_details"]))
    assert counts[1] < counts[0] / 2, counts


@test
def test_drafts_begin_with_the_newest_tokens_state(options):
    """Also where that is of a row behind a draft: in pairs of digits, who echoes the newest one's
    state is right once it is the first of a pair, and stays so."""
    with Cluster(options.bin, kvstore=0, decode_args=["--medusa-heads", echo(options)]) as c:
        reply = c.complete("1122" * 24 + "1", max_tokens=48, temperature=0, ignore_eos=True,
                           speculation={"drafter": "medusa", "k": 1})
        assert reply.text == "1221" * 12, reply.text
        details = reply.usage["completion_tokens_details"]
        assert details["rejected_prediction_tokens"] <= 1, details
        assert details["accepted_prediction_tokens"] >= 22, details


@test
def test_same_seed_same_heads(options):
    """On any number of threads."""
    first, second = (os.path.join(folder, name) for name in ("one", "two"))
    small = ["--tokens", "1024", "--held-out-tokens", "256", "--epochs", "2"]
    for path, threads in ((first, "1"), (second, "2")):
        ended = train(options, path, *small, "--threads", threads)
        assert ended.returncode == 0, ended.stderr
        assert "held-out positions" in ended.stdout and "tokens a step" in ended.stdout
        assert not os.path.exists(path + ".state")
    assert read(first) == read(second)
    metadata = read(first)[0]["__metadata__"]
    assert metadata["seed"] == "1" and len(metadata["acceptance"].split()) == 3, metadata


@test
def test_train_refuses(options):
    path = os.path.join(folder, "never")
    for more in (["--hidden", "100"], ["--batch", "100"], ["--seed", "x"], ["--steps", "9"],
                 ["--model", os.path.join(folder, "none")]):
        ended = train(options, path, *more)
        assert ended.returncode != 0 and ended.stderr and not os.path.exists(path), more


@test
def test_other_heads_are_refused(options):
    header, data = read(heads(options))
    another = json.loads(json.dumps(header))
    another["__metadata__"]["model_fingerprint"] = "0" * 64
    short = os.path.join(folder, "short")
    cases = [
        (write(os.path.join(folder, "another"), another, data), "it was made for another model"),
        (write(short, header, data[:-4]), "data_offsets outside the file"),
        (os.path.join(folder, "none"), "tensor file not opened"),
    ]
    for path, why in cases:
        try:
            with Cluster(options.bin, kvstore=0, decode_args=["--medusa-heads", path]):
                raise AssertionError("it started")
        except RuntimeError as refused:
            assert why in str(refused), (path, refused)


@test
def test_without_heads_there_are_no_drafts(options):
    with Cluster(options.bin, kvstore=0) as c:
        for _ in range(2):
            reply = c.complete(FREE, max_tokens=8, speculation={"drafter": "medusa", "k": 3})
            assert drafted(reply.usage["completion_tokens_details"]) == 0
        assert c.log("decode-1").count("drafter not possible here") == 1


if __name__ == "__main__":
    main(__doc__)
