"""I1 through the whole cluster: token ids and bit-equal logits against one process, whatever the way."""
import concurrent.futures
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import Cluster, main, test
from one_process import ask, one_process, reference_prompts

STEPS = 12


def prompts_of_all_lengths():
    """Under a block, across blocks, hundreds of tokens."""
    return reference_prompts("v00", "v05", "v10", "v14", "v15", "v17", "v20", "v21")


def computed(options, prompts):
    return one_process(options, prompts, STEPS)


def answer(cluster, ids, **parameters):
    return ask(cluster, ids, STEPS, **parameters)[0]


def check_all(cluster, prompts, expected, **parameters):
    for ids, one in zip(prompts, expected):
        assert answer(cluster, ids, **parameters) == one, f"{len(ids)} prompt tokens"


def cluster_of(options, **parameters):
    return Cluster(options.bin, router_args=["--allow-placement"], **parameters)


@test
def test_i1_cluster_equals_one_process_cold_then_cached(options):
    prompts = prompts_of_all_lengths()
    expected = computed(options, prompts)
    with cluster_of(options) as c:
        check_all(c, prompts, expected)  # cold
        check_all(c, prompts, expected)  # from the caches of both nodes
        cached = c.metrics("prefill-1")['tandem_prefill_prompt_tokens_total{source="local"}']
        assert cached > 0


@test
def test_i1_over_the_tcp_carrier(options):
    prompts = prompts_of_all_lengths()
    expected = computed(options, prompts)
    with cluster_of(options, env={"UCX_TLS": "tcp"}) as c:
        check_all(c, prompts, expected)
        assert c.metrics("decode-1")['tandem_decode_transfer_bytes_total{carrier="tcp"}'] > 0


@test
def test_i1_chunk_sizes_and_threads_through_the_cluster(options):
    prompts = prompts_of_all_lengths()
    expected = computed(options, prompts)
    for chunk, threads in ((7, 1), (16, 2), (512, 2)):
        with cluster_of(options, prefill_args=["--chunk-tokens", str(chunk)], threads=threads,
                        kvstore=0) as c:
            check_all(c, prompts, expected)


@test
def test_i1_eight_requests_together_equal_each_alone(options):
    prompts = prompts_of_all_lengths()
    expected = computed(options, prompts)
    with cluster_of(options) as c, concurrent.futures.ThreadPoolExecutor(8) as pool:
        for _ in range(2):
            got = list(pool.map(lambda ids: answer(c, ids), prompts))
            assert got == expected


@test
def test_i1_prefix_from_the_store_on_another_prefill_node(options):
    prompts = [ids for ids in prompts_of_all_lengths() if len(ids) > 40]
    expected = computed(options, prompts)
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
    prompts = [ids for ids in prompts_of_all_lengths() if len(ids) > 40]
    expected = computed(options, prompts)
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
        ids = prompts_of_all_lengths()[0]
        tokens, hashes = answer(c, ids)
    (other,) = computed(options, [ids])
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
