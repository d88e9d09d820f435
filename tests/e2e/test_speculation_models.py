"""Drafters that need passes of a model - a draft model, or the model's first layers - change how fast
an answer comes, and not one token of it; and what they hold they give back."""
import atexit
import functools
import os
import shutil
import struct
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import ROOT, Cluster, main, run_together, shared, test, wait_until
import speculation
from speculation import (COPY, FREE, MODEL_SAMPLINGS as SAMPLINGS, drafted, far_apart, same_in_batches,
                         same_with_endings, sample, wishes_of)

MODEL = os.path.join(ROOT, "build", "models", "SmolLM2-135M-Instruct.Q4_1.gguf")
DRAFTERS = ["draft_model", "early_exit"]
ask = functools.partial(speculation.ask, max_tokens=24)
DRAFT_BLOCK_BYTES = 16 * 10 * 2 * 3 * 64 * 2  # of 10 layers, f16

folder = tempfile.mkdtemp(prefix="tandem-draft-")
atexit.register(shutil.rmtree, folder, ignore_errors=True)


def truncated(options, layers):
    """A draft model: the model's first layers."""
    path = os.path.join(folder, f"first-{layers}.gguf")
    if not os.path.exists(path):
        subprocess.run([os.path.join(options.bin, "tandem-truncate"), "--layers", str(layers), MODEL,
                        path], check=True)
    return path


def cluster(options):
    # Confidence 1 %: drafts are long, and many of them wrong.
    return shared(options, router_args=["--allow-placement"], draft_model=truncated(options, 10),
                  decode_args=["--draft-confidence", "1"])


def held(c):
    """Blocks of both pools that somebody holds."""
    metrics = c.metrics("decode-1")
    return sum(metrics[f'tandem_decode_{pool}_blocks{{state="{state}"}}']
               for pool in ("kv", "draft_kv") for state in ("reserved", "active"))


def nothing_held(c):
    wait_until(lambda: held(c) == 0, 10, "nothing held")


@test
def test_i1_model_drafters_any_k_gives_the_same_tokens(options):
    c = cluster(options)
    tried = {drafter: 0 for drafter in DRAFTERS}
    for prompt in (COPY, FREE):
        for sampling in SAMPLINGS:
            every = prompt == COPY and sampling in (SAMPLINGS[0], SAMPLINGS[-1])
            expected, _ = ask(c, prompt, {"drafter": "none"}, **sampling)
            for drafter in DRAFTERS:
                for k in range(0, 9) if every else (1, 4, 8):
                    got, details = ask(c, prompt, {"drafter": drafter, "k": k}, **sampling)
                    assert got == expected, (drafter, prompt, sampling, k, got, expected)
                    tried[drafter] += drafted(details)
                    assert k > 0 or drafted(details) == 0
                got, _ = ask(c, prompt, {"drafter": drafter}, **sampling)  # k by its own plan
                assert got == expected, (drafter, prompt, sampling, "own k")
    assert min(tried.values()) > 200, tried
    nothing_held(c)


@test
def test_i1_model_drafters_with_stops_choices_and_minimum(options):
    c = cluster(options)
    same_with_endings(c, ask, DRAFTERS)
    nothing_held(c)


@test
def test_i1_batches_of_all_drafters(options):
    c = cluster(options)
    same_in_batches(c, ask, SAMPLINGS[:3], wishes_of(["none", "prompt_lookup", *DRAFTERS]))
    nothing_held(c)


@test
def test_rejection_rule_keeps_the_distribution(options):
    c = cluster(options)
    plain, _, _ = sample(c, COPY, {"drafter": "none"}, 64)
    for drafter in ("prompt_lookup", *DRAFTERS):
        wish = {"drafter": drafter, "k": 3, "rule": "rejection"}
        texts, accepted, rejected = sample(c, COPY, wish, 64)
        assert rejected > 50 and accepted > 50, (drafter, accepted, rejected)
        apart = far_apart(plain, texts)
        assert apart < 4.5, (drafter, apart)  # by chance three times in a million
    expected, _ = ask(c, COPY, {"drafter": "none"}, temperature=0)
    for drafter in ("prompt_lookup", *DRAFTERS):  # without chance there is one answer
        got, details = ask(c, COPY, {"drafter": drafter, "k": 4, "rule": "rejection"},
                           temperature=0)
        assert got == expected
        assert drafted(details) > 0
    nothing_held(c)


@test
def test_draft_prefixes_are_kept(options):
    """The same prompt again, and several choices of one: the draft model doesn't compute it anew."""
    c = cluster(options)

    def contexts():
        metrics = c.metrics("decode-1")
        return [metrics[f'tandem_decode_draft_context_tokens_total{{source="{source}"}}']
                for source in ("cache", "computed")]

    prompt = "A prompt that nobody else asks with. " * 12
    wish = {"drafter": "draft_model", "k": 4}
    start = contexts()
    ask(c, prompt, wish, temperature=0)
    first = contexts()
    assert first[0] == start[0] and first[1] - start[1] > 80, (start, first)
    ask(c, prompt, wish, temperature=0)
    again = contexts()
    assert again[0] - first[0] >= 80 and again[1] - first[1] < first[1] - start[1] - 70, again
    # Another tenant's are not found.
    ask(c, prompt, wish, temperature=0, cache_salt="another")
    other = contexts()
    assert other[0] == again[0], (again, other)
    nothing_held(c)


@test
def test_first_layers_draft_the_same_either_way(options):
    """A draft model of the first ten layers, and ten layers of thirty: the same drafts."""
    c = cluster(options)
    for sampling in SAMPLINGS[:2]:
        counts = [ask(c, FREE, {"drafter": drafter, "k": 3}, **sampling)[1] for drafter in DRAFTERS]
        assert counts[0] == counts[1] and drafted(counts[0]) > 20, (sampling, counts)


@test
def test_draft_model_that_is_the_model_is_always_right(options):
    with Cluster(options.bin, draft_model=MODEL, decode_args=["--draft-confidence", "0"]) as c:
        for sampling in SAMPLINGS[:3]:
            details = c.complete(FREE, max_tokens=64, ignore_eos=True, **sampling, speculation={
                "drafter": "draft_model", "k": 5}).usage["completion_tokens_details"]
            assert details["rejected_prediction_tokens"] == 0, (sampling, details)
            assert details["accepted_prediction_tokens"] >= 40, (sampling, details)
        nothing_held(c)


@test
def test_early_exit_of_more_layers_is_right_more_often(options):
    shares = []
    for layers in (1, 29):
        with Cluster(options.bin, decode_args=["--early-exit-layers", str(layers),
                                               "--draft-confidence", "0"]) as c:
            details = c.complete(COPY, max_tokens=64, ignore_eos=True, temperature=0, speculation={
                "drafter": "early_exit", "k": 3}).usage["completion_tokens_details"]
            shares.append(details["accepted_prediction_tokens"] / drafted(details))
            # No draft model here: such a request has its answer, and no drafts.
            reply = c.complete(FREE, max_tokens=8, speculation={"drafter": "draft_model", "k": 3})
            assert drafted(reply.usage["completion_tokens_details"]) == 0
            assert c.log("decode-1").count("drafter not possible here") == 1
    assert shares[0] < 0.3 and shares[1] > 0.5, shares


@test
def test_unsure_drafters_draft_less(options):
    counts = []
    for percent in (0, 95):
        with Cluster(options.bin, draft_model=truncated(options, 10),
                     decode_args=["--draft-confidence", str(percent)]) as c:
            for drafter in DRAFTERS:
                details = c.complete(FREE, max_tokens=48, ignore_eos=True, temperature=0,
                                     speculation={"drafter": drafter, "k": 4}).usage[
                                         "completion_tokens_details"]
                counts.append(drafted(details))
    assert counts[2] < counts[0] / 2 and counts[3] < counts[1] / 2, counts


@test
def test_another_vocabulary_is_refused(options):
    path = truncated(options, 1)
    with open(path, "rb") as file:
        data = bytearray(file.read())
    token = "\u0120harbor".encode()
    at = data.index(struct.pack("<Q", len(token)) + token) + 8
    data[at:at + len(token)] = "\u0120horbar".encode()
    other = os.path.join(folder, "other.gguf")
    with open(other, "wb") as file:
        file.write(data)
    try:
        with Cluster(options.bin, draft_model=other):
            raise AssertionError("it started")
    except RuntimeError as refused:
        assert "draft model has another vocabulary" in str(refused), refused
        assert "first_token_that_differs=" in str(refused), refused


@test
def test_i1_small_draft_pool(options):
    """Room for some contexts but not for what they become, or for no whole one: whoever finds none
    doesn't draft."""
    for blocks in (24, 4):
        with Cluster(options.bin, draft_model=truncated(options, 10),
                     router_args=["--draft-explore", "0"],
                     decode_args=["--draft-kv-memory", str(blocks * DRAFT_BLOCK_BYTES)]) as c:
            for _ in range(24):  # outputs are short, it learns, and promises little
                c.complete(FREE, max_tokens=4, ignore_eos=True)
            alone = c.complete(COPY, max_tokens=60, temperature=0, ignore_eos=True,
                               speculation={"drafter": "none"}).text

            def run(number):
                reply = c.complete(COPY, max_tokens=60, temperature=0, ignore_eos=True,
                                   cache_salt=str(number),
                                   speculation={"drafter": "draft_model", "k": 4})
                assert reply.text == alone, (number, reply.text, alone)

            run_together([(number,) for number in range(5)], run)
            series = 'tandem_decode_drafter_tokens_total{{drafter="draft_model",result="{}"}}'
            drafts = sum(c.metrics("decode-1")[series.format(r)] for r in ("accepted", "rejected"))
            assert (drafts > 0) == (blocks == 24), (blocks, drafts)
            nothing_held(c)


@test
def test_i1_model_drafters_under_a_window(options):
    """Blocks that no later position sees are given up in the draft model's pool as well."""
    with Cluster(options.bin, draft_model=truncated(options, 10), attention="window:64,4",
                 decode_args=["--draft-confidence", "1",
                              "--draft-kv-memory", str(16 * DRAFT_BLOCK_BYTES)]) as c:
        prompt = COPY * 4  # many times the window, and more than the draft model's pool
        for drafter in DRAFTERS:
            expected = c.complete(prompt, max_tokens=24, temperature=0, ignore_eos=True,
                                  speculation={"drafter": "none"}).text
            reply = c.complete(prompt, max_tokens=24, temperature=0, ignore_eos=True,
                               speculation={"drafter": drafter, "k": 4})
            assert reply.text == expected, (drafter, reply.text, expected)
            assert drafted(reply.usage["completion_tokens_details"]) > 0, drafter
        assert c.metrics("decode-1")[
            'tandem_decode_draft_context_tokens_total{source="computed"}'] > 16 * 16
        nothing_held(c)


@test
def test_i1_preempted_with_model_drafters(options):
    with Cluster(options.bin, kvstore=0, draft_model=truncated(options, 10),
                 decode_args=["--kv-memory", str(30 * 368640)],
                 router_args=["--queue-ms", "60000"]) as c:
        for _ in range(24):  # outputs are short, it learns, and promises little
            c.complete(FREE, max_tokens=4, ignore_eos=True)
        alone = c.complete(COPY, max_tokens=150, temperature=0, ignore_eos=True,
                           speculation={"drafter": "none"}).text

        def run(drafter, k, n):
            reply = c.complete(COPY, max_tokens=150, temperature=0, ignore_eos=True, n=n,
                               cache_salt=f"{drafter} {k}", speculation={"drafter": drafter, "k": k})
            assert reply.texts == [alone] * n, (drafter, k, reply.texts, alone)

        run_together([("draft_model", 8, 1), ("early_exit", 8, 1), ("draft_model", 3, 2),
                      ("early_exit", 2, 2)], run)
        assert c.metrics("decode-1")["tandem_decode_preemptions_total"] > 0
        nothing_held(c)


@test
def test_truncate_refuses(options):
    program = os.path.join(options.bin, "tandem-truncate")
    out = os.path.join(folder, "never.gguf")
    for layers in ("0", "31", "x"):
        ended = subprocess.run([program, "--layers", layers, MODEL, out], capture_output=True,
                               check=False)
        assert ended.returncode != 0 and ended.stderr and not os.path.exists(out), layers


if __name__ == "__main__":
    main(__doc__)
