"""Windows and strides through the whole cluster: bit-equal to one process that keeps every block, cold,
from caches, after giving way, and in pools far smaller than the stream."""
import os
import subprocess
import sys
import threading

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import Cluster, main, run_together, test
from one_process import MODEL, ask, one_process

BLOCK_BYTES = 368640  # 16 tokens of the quick start's model
STATES = ("free", "reserved", "cached", "active", "quarantined")


def prompt_ids(count, first=0):
    """Words as they come: any ids do, as long as they differ."""
    return [1000 + (first + i * 7919) % 40000 for i in range(count)]


def computed(options, attention, prompts, steps, context_max=0):
    flags = ["--context-max", str(context_max)] if context_max else []
    return one_process(options, prompts, steps, "--attention", attention, *flags)


def blocks(c, node):
    kind = node.split("-", maxsplit=1)[0]
    metrics = c.metrics(node)
    return {state: metrics[f'tandem_{kind}_kv_blocks{{state="{state}"}}'] for state in STATES}


class Peak:
    """The most blocks that a node held or had promised at once, while something runs."""

    def __init__(self, c, node):
        self.c, self.node, self.most, self.totals = c, node, 0, set()
        self.end = threading.Event()
        self.thread = threading.Thread(target=self._watch)

    def _watch(self):
        while not self.end.wait(0.02):
            counts = blocks(self.c, self.node)
            self.most = max(self.most, counts["active"] + counts["reserved"])
            self.totals.add(sum(counts.values()))

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.end.set()
        self.thread.join()


@test
def test_i1_a_stream_through_a_pool_far_smaller_than_it(options):
    # 1,400 tokens are 88 blocks; a window of 256 and a chunk of 128 touch 25, a window alone 17.
    ids, steps = prompt_ids(900), 500
    expected = computed(options, "window:256", [ids, ids + [5]], steps)
    assert expected[0] != computed(options, "full", [ids], steps)[0], "the window is used"
    with Cluster(options.bin, prefill=2, decode=2, attention="window:256",
                 prefill_args=["--chunk-tokens", "128", "--kv-memory", str(42 * BLOCK_BYTES)],
                 decode_args=["--kv-memory", str(22 * BLOCK_BYTES)],
                 router_args=["--allow-placement"]) as c:
        assert "attention=window:256" in c.log("prefill-1")
        first = {"prefill": "prefill-1", "decode": "decode-1"}
        with Peak(c, "prefill-1") as prefill, Peak(c, "decode-1") as decode:
            assert ask(c, ids, steps, tandem=first) == (expected[0], 0)
        assert decode.totals == {22} and prefill.totals == {42}
        # What the store still reads of blocks that were given up counts as well.
        assert decode.most <= 22 and prefill.most <= 42, (decode.most, prefill.most)
        c.wait_at_rest(["prefill-1", "decode-1"], 10)
        # Again: from the window that is still here, though what lies before it is gone.
        answer, cached = ask(c, ids, steps, tandem=first)
        assert answer == expected[0]
        assert cached == 896, cached
        # Elsewhere, from the store, of which only what is seen is fetched.
        c.wait_until(lambda: c.metrics("kvstore-1")["tandem_kvstore_keys"] >= 56, 10,
                     "the prompt's blocks in the store")
        other = {"prefill": "prefill-2", "decode": "decode-2"}
        answer, cached = ask(c, ids + [5], steps, tandem=other)
        assert answer == expected[1]
        assert cached == 896, cached
        assert c.metrics("prefill-2")['tandem_prefill_prompt_tokens_total{source="store"}'] == 896
        assert blocks(c, "prefill-2")["cached"] <= 18, "what is not seen was not fetched"
        c.wait_at_rest(["prefill-1", "decode-1", "prefill-2", "decode-2"], 10)


@test
def test_i1_strides_and_sinks_through_the_cluster(options):
    ids, steps = prompt_ids(300, 77), 60
    for attention in ("strided:64,64,8", "window:48,4"):
        expected = computed(options, attention, [ids], steps)[0]
        with Cluster(options.bin, kvstore=0, attention=attention,
                     prefill_args=["--chunk-tokens", "50"], router_args=["--allow-placement"]) as c:
            assert ask(c, ids, steps) == (expected, 0)
            answer, cached = ask(c, ids, steps)
            assert answer == expected and cached == 288
            several = c.complete(ids, max_tokens=steps, temperature=0.9, seed=3, n=3, ignore_eos=True)
            alone = c.complete(ids, max_tokens=steps, temperature=0.9, seed=3, n=1, ignore_eos=True)
            assert several.choices[0]["text"] == alone.choices[0]["text"]
            again = c.complete(ids, max_tokens=steps, temperature=0.9, seed=3, n=3, ignore_eos=True)
            assert [x["text"] for x in again.choices] == [x["text"] for x in several.choices]
            # The hand-off moved what later tokens see and no more: of strides a block in four.
            early = c.metrics("decode-1")['tandem_decode_handoff_bytes_total{when="early"}']
            late = c.metrics("decode-1")['tandem_decode_handoff_bytes_total{when="late"}']
            needed = 4 + 5 if attention.startswith("strided") else 1 + 4
            assert early + late <= 4 * needed * BLOCK_BYTES, (early, late)
            c.wait_at_rest(["prefill-1", "decode-1"], 10)


@test
def test_i1_a_context_longer_than_the_models(options):
    ids, steps = prompt_ids(8300), 6
    expected = computed(options, "window:128", [ids], steps, context_max=9000)[0]
    with Cluster(options.bin, kvstore=0, attention="window:128", context_max=9000,
                 kv_memory=str(40 * BLOCK_BYTES), router_args=["--allow-placement"]) as c:
        assert ask(c, ids, steps) == (expected, 0)
        models = c.request("GET", "/v1/models").json
        assert models["data"][0]["max_model_len"] == 9000
        reply = c.complete(prompt_ids(9000), max_tokens=1, check=False)
        assert reply.status == 400, reply.status


@test
def test_i1_requests_give_way_and_come_back_under_a_window(options):
    # A window of 64 touches five blocks: two of eight requests fit into twelve at their full size.
    def one(c, index):
        return ask(c, prompt_ids(10 + index, index), 150)[0]

    with Cluster(options.bin, attention="window:64", decode_args=["--kv-memory", str(12 * BLOCK_BYTES)],
                 router_args=["--allow-placement", "--queue-ms", "600000"],
                 http_timeout_s=600) as c:
        for _ in range(20):  # until the node promises a request little more than its prompt
            c.complete("Hi", max_tokens=1)
        answers = [None] * 8

        def run(index):
            answers[index] = one(c, index)
        run_together([(index,) for index in range(8)], run)
        assert c.metrics("decode-1")["tandem_decode_preemptions_total"] > 0
        expected = computed(options, "window:64", [prompt_ids(10 + i, i) for i in range(8)], 150)
        assert answers == expected
        c.wait_at_rest(["decode-1"], 10)


@test
def test_nodes_of_another_mask_are_refused(options):
    with Cluster(options.bin, kvstore=0, attention="window:128", kv_memory="64M") as c:
        c.expect_refused(["--model", MODEL, "--kv-memory", "64M", "--attention", "window:127"],
                         "attention", "window:127", "window:128")
        assert c.chat("Hello!", max_tokens=4).text


@test
def test_a_wrong_mask_is_told_the_forms(options):
    for attention in ("window", "window:0", "strided:16,16"):
        done = subprocess.run(
            [os.path.join(options.bin, "tandem-decode"), "--attention", attention, "--model", MODEL,
             "--router", "tcp://127.0.0.1:1"], capture_output=True, text=True, check=False)
        assert done.returncode == 1, done
        assert "attention not understood" in done.stderr and f'got="{attention}"' in done.stderr
        assert "window:W" in done.stderr and "strided:LOCAL,STRIDE" in done.stderr, done.stderr
    done = subprocess.run(
        [os.path.join(options.bin, "tandem-decode"), "--context-max", "9000", "--model", MODEL,
         "--router", "tcp://127.0.0.1:1"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "context longer than the model's" in done.stderr, done


if __name__ == "__main__":
    main(__doc__)
