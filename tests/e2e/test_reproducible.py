"""I1 through the whole cluster: token ids and bit-equal logits against one process, whatever the way."""
import concurrent.futures
import json
import os
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import ROOT, Cluster, main, test

MODEL = os.path.join(ROOT, "build/models/SmolLM2-135M-Instruct.Q4_1.gguf")
STEPS = 12


def reference_prompts():
    """id lists of several lengths: under a block, across blocks, hundreds of tokens."""
    with open(os.path.join(ROOT, "tests/data/reference_smollm2.jsonl"), encoding="utf-8") as file:
        jobs = [json.loads(line) for line in file]
    return [job["ids"] for job in jobs if job["id"] in ("v00", "v05", "v10", "v14", "v15", "v17",
                                                         "v20", "v21")]


def one_process(options, prompts):
    """What tandem-bench eval computes for them in a single process: [(ids, hashes)]."""
    jobs = "".join(json.dumps({"id": str(i), "ids": ids, "gen": STEPS, "topk": 0, "hashes": True})
                   + "\n" for i, ids in enumerate(prompts))
    out = subprocess.run([os.path.join(options.bin, "tandem-bench"), "eval", "--model", MODEL,
                          "--threads", "2"], input=jobs, capture_output=True, text=True, check=True)
    results = [json.loads(line) for line in out.stdout.splitlines()]
    return [(result["greedy"], result["logits_xxh"]) for result in results]


def ask(cluster, ids, **parameters):
    """(token ids, hashes) of a greedy completion."""
    reply = cluster.complete(ids, max_tokens=STEPS, temperature=0, **parameters)
    tandem = reply.json["tandem"]
    return tandem["tokens"][0], tandem["logits_xxh"][0]


def check_all(cluster, prompts, expected, **parameters):
    for ids, (tokens, hashes) in zip(prompts, expected):
        assert ask(cluster, ids, **parameters) == (tokens, hashes), f"{len(ids)} prompt tokens"


def cluster_of(options, **parameters):
    return Cluster(options.bin, router_args=["--allow-placement"], **parameters)


@test
def test_i1_cluster_equals_one_process_cold_then_cached(options):
    prompts = reference_prompts()
    expected = one_process(options, prompts)
    with cluster_of(options) as c:
        check_all(c, prompts, expected)  # cold
        check_all(c, prompts, expected)  # from the caches of both nodes
        cached = c.metrics("prefill-1")['tandem_prefill_prompt_tokens_total{source="local"}']
        assert cached > 0


@test
def test_i1_over_the_tcp_carrier(options):
    prompts = reference_prompts()
    expected = one_process(options, prompts)
    with cluster_of(options, env={"UCX_TLS": "tcp"}) as c:
        check_all(c, prompts, expected)
        assert c.metrics("decode-1")['tandem_decode_transfer_bytes_total{carrier="tcp"}'] > 0


@test
def test_i1_chunk_sizes_and_threads_through_the_cluster(options):
    prompts = reference_prompts()
    expected = one_process(options, prompts)
    for chunk, threads in ((7, 1), (16, 2), (512, 2)):
        with cluster_of(options, prefill_args=["--chunk-tokens", str(chunk)], threads=threads,
                        kvstore=0) as c:
            check_all(c, prompts, expected)


@test
def test_i1_eight_requests_together_equal_each_alone(options):
    prompts = reference_prompts()
    expected = one_process(options, prompts)
    with cluster_of(options) as c, concurrent.futures.ThreadPoolExecutor(8) as pool:
        for _ in range(2):
            got = list(pool.map(lambda ids: ask(c, ids), prompts))
            assert got == [(tokens, hashes) for tokens, hashes in expected]


@test
def test_i1_prefix_from_the_store_on_another_prefill_node(options):
    prompts = [ids for ids in reference_prompts() if len(ids) > 40]
    expected = one_process(options, prompts)
    with cluster_of(options, prefill=2, decode=2) as c:
        check_all(c, prompts, expected, tandem={"prefill": "prefill-1", "decode": "decode-1"})
        full = sum((len(ids)) // 16 for ids in prompts)
        c.wait_until(lambda: c.metrics("kvstore-1")["tandem_kvstore_keys"] > 0.5 * full, 10,
                     "blocks in the store")
        check_all(c, prompts, expected, tandem={"prefill": "prefill-2", "decode": "decode-2"})
        series = c.metrics("prefill-2")
        assert series['tandem_prefill_prompt_tokens_total{source="store"}'] > 0
        assert series["tandem_prefill_checksum_failures_total"] == 0


@test
def test_i1_prefix_from_two_segments(options):
    prompts = [ids for ids in reference_prompts() if len(ids) > 40]
    expected = one_process(options, prompts)
    with cluster_of(options, prefill=2, kvstore=2) as c:
        check_all(c, prompts, expected, tandem={"prefill": "prefill-1"})
        stored = lambda node: c.metrics(node)['tandem_kvstore_kv_blocks{state="cached"}']
        c.wait_until(lambda: stored("kvstore-1") > 0 and stored("kvstore-2") > 0, 10,
                     "blocks in both segments")
        check_all(c, prompts, expected, tandem={"prefill": "prefill-2"})
        series = c.metrics("prefill-2")
        assert series['tandem_prefill_prompt_tokens_total{source="store"}'] > 0
        assert series["tandem_prefill_checksum_failures_total"] == 0


@test
def test_i1_precisions_are_classes_of_their_own(options):
    with cluster_of(options, precision="exact") as c:
        ids = reference_prompts()[0]
        tokens, hashes = ask(c, ids)
    (other,) = one_process(options, [ids])
    assert hashes != other[1]
    assert len(tokens) == len(hashes)


@test
def test_i1_seed_repeats_and_streaming_changes_nothing(options):
    with cluster_of(options, prefill=2, decode=2) as c:
        ask_for = dict(max_tokens=24, temperature=0.9, top_p=0.95, seed=7, n=2)
        whole = c.chat("Tell me about the sea.", **ask_for)
        again = c.chat("Tell me about the sea.", **ask_for)
        other = c.chat("Tell me about the sea.", **{**ask_for, "seed": 8})
        stream = c.chat("Tell me about the sea.", stream=True, **ask_for).collect()
        assert whole.texts == again.texts
        assert whole.texts[0] != whole.texts[1], "choices draw from different noise"
        assert whole.texts != other.texts
        assert [stream.texts[0], stream.texts[1]] == whole.texts
        assert stream.done


if __name__ == "__main__":
    main(__doc__)
