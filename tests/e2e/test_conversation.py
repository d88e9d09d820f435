"""Turns of a conversation: what was computed before is not computed again, wherever the turn lands."""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import Cluster, main, test

BLOCK = 16


def source(cluster, node, kind):
    return cluster.metrics(node)[f'tandem_prefill_prompt_tokens_total{{source="{kind}"}}']


def first_turn(c, **place):
    question = "List the planets of the solar system and say one sentence about each of them."
    ids = c.request("POST", "/tokenize", {"messages": [{"role": "user", "content": question}]},
                    check=True).json["tokens"]
    reply = c.complete(ids, max_tokens=70, temperature=0, ignore_eos=True, **place)
    return ids + reply.json["tandem"]["tokens"][0]


def second_turn(c, history, **place):
    more = c.request("POST", "/tokenize", {"prompt": "<|im_end|>\n<|im_start|>user\nAnd the moons?"
                                           "<|im_end|>\n<|im_start|>assistant\n"},
                     check=True).json["tokens"]
    reply = c.complete(history + more, max_tokens=8, temperature=0, **place)
    return more, reply


@test
def test_second_turn_computes_its_new_tokens_only(options):
    with Cluster(options.bin, router_args=["--allow-placement"]) as c:
        history = first_turn(c)
        # The last token's KV is never written; full blocks before it are.
        full = (len(history) - 1) // BLOCK
        c.wait_until(lambda: c.metrics("kvstore-1")["tandem_kvstore_keys"] >= full, 10,
                     "generated blocks in the store")
        before = source(c, "prefill-1", "computed")
        more, reply = second_turn(c, history)
        computed = source(c, "prefill-1", "computed") - before
        assert computed <= len(more) + BLOCK, f"{computed} computed for {len(more)} new tokens"
        cached = reply.usage["prompt_tokens_details"]["cached_tokens"]
        assert cached == len(history) + len(more) - computed
        assert source(c, "prefill-1", "store") > 0  # the decode node's blocks came that way


@test
def test_second_turn_on_another_prefill_node_goes_through_the_store(options):
    with Cluster(options.bin, prefill=2, decode=2, router_args=["--allow-placement"]) as c:
        history = first_turn(c, tandem={"prefill": "prefill-1", "decode": "decode-1"})
        full = (len(history) - 1) // BLOCK
        c.wait_until(lambda: c.metrics("kvstore-1")["tandem_kvstore_keys"] >= full, 10,
                     "blocks in the store")
        more, reply = second_turn(c, history,
                                  tandem={"prefill": "prefill-2", "decode": "decode-2"})
        computed = source(c, "prefill-2", "computed")
        assert computed <= len(more) + BLOCK, f"{computed} computed for {len(more)} new tokens"
        cached = reply.usage["prompt_tokens_details"]["cached_tokens"]
        assert cached == len(history) + len(more) - computed
        assert reply.headers["x-tandem-prefill"] == "prefill-2"
        assert reply.headers["x-tandem-decode"] == "decode-2"


@test
def test_i8_another_salt_finds_nothing(options):
    with Cluster(options.bin) as c:
        prompt = "The quick brown fox jumps over the lazy dog. " * 8
        ask = lambda salt: c.complete(prompt, max_tokens=1, temperature=0, cache_salt=salt)
        assert ask("a").usage["prompt_tokens_details"]["cached_tokens"] == 0
        assert ask("a").usage["prompt_tokens_details"]["cached_tokens"] > 0
        assert ask("b").usage["prompt_tokens_details"]["cached_tokens"] == 0


def flip_stored_blocks(pid, pool_bytes, block_bytes):
    """Changes one byte of every block of a process's own pool, behind its back."""
    flipped = 0
    with open(f"/proc/{pid}/maps", encoding="utf-8") as maps:
        regions = [line.split()[0] for line in maps if "/SYSV" in line or "/dev/shm" in line]
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for region in regions:
            start, end = (int(text, 16) for text in region.split("-"))
            if abs(end - start - pool_bytes) > (2 << 20):
                continue  # UCX's own, or another process's pool that is mapped here
            for at in range(start + 5000, end, block_bytes):
                memory.seek(at)
                byte = memory.read(1)[0]
                memory.seek(at)
                memory.write(bytes([byte ^ 0x55]))
                flipped += 1
    return flipped


@test
def test_f5_wrong_bytes_in_the_store_are_recomputed_never_used(options):
    with Cluster(options.bin, prefill=2, router_args=["--allow-placement"],
                 kvstore_args=["--capacity", "100M"]) as c:
        prompt = "The lighthouse keeper wrote a letter about the storm of that winter. " * 8
        ask = lambda node: c.complete(prompt, max_tokens=12, temperature=0,
                                      tandem={"prefill": node}).json["tandem"]
        right = ask("prefill-1")
        c.wait_until(lambda: c.metrics("kvstore-1")["tandem_kvstore_keys"] >= 7, 10,
                     "blocks in the store")
        assert flip_stored_blocks(c.pids()["kvstore-1"], 100 << 20, 368640) > 0
        for _ in range(2):  # computed again, then from its own cache: which must be right, too
            got = ask("prefill-2")
            assert (got["tokens"], got["logits_xxh"]) == (right["tokens"], right["logits_xxh"])
        assert c.metrics("prefill-2")["tandem_prefill_checksum_failures_total"] > 0
        assert source(c, "prefill-2", "store") == 0
        assert source(c, "prefill-2", "local") > 0


@test
def test_i3_wrong_bytes_in_a_prefill_pool_reach_no_answer(options):
    # Pools of different sizes: each process maps the others' too.
    with Cluster(options.bin, decode=2, kvstore=0, prefill_args=["--kv-memory", "110M"],
                 decode_args=["--kv-memory", "130M"], router_args=["--allow-placement"]) as c:
        prompt = "The lighthouse keeper wrote a letter about the storm of that winter. " * 8
        ask = lambda node: c.complete(prompt, max_tokens=12, temperature=0,
                                      tandem={"decode": node}).json["tandem"]
        right = ask("decode-1")
        assert flip_stored_blocks(c.pids()["prefill-1"], 110 << 20, 368640) > 0
        got = ask("decode-2")  # the wrong blocks are found, dropped, and computed again
        assert (got["tokens"], got["logits_xxh"]) == (right["tokens"], right["logits_xxh"])
        assert c.metrics("decode-2")["tandem_decode_checksum_failures_total"] > 0
        assert c.metrics("prefill-1")["tandem_prefill_checksum_failures_total"] > 0


@test
def test_i9_an_answer_across_a_node_death_is_the_clean_runs(options):
    prompt = "Write a short story about a clockmaker and a river. " * 4
    ask_for = dict(max_tokens=40, temperature=0.8, seed=11, n=2, ignore_eos=True)
    with Cluster(options.bin, prefill=2, decode=2, router_args=["--allow-placement"],
                 args_of={"decode-2": ["--fault", "decode_token:kill:20"],
                          "prefill-2": ["--fault", "prefill_ready:kill"]}) as c:
        place = lambda p, d: {"tandem": {"prefill": p, "decode": d}}
        clean = c.complete(prompt, **ask_for, **place("prefill-1", "decode-1"))
        for prefill, decode in (("prefill-2", "decode-1"), ("prefill-1", "decode-2")):
            broken = c.complete(prompt, **ask_for, **place(prefill, decode))
            assert broken.texts == clean.texts
            assert broken.json["tandem"]["logits_xxh"] == clean.json["tandem"]["logits_xxh"]
            assert broken.usage["completion_tokens"] == clean.usage["completion_tokens"]
        assert not c.alive("prefill-2") and not c.alive("decode-2")


@test
def test_f14_a_tiny_pool_serves_everybody_in_turn(options):
    """Admission counts growth: nothing is evicted under a running request, nobody waits for ever."""
    import concurrent.futures
    with Cluster(options.bin, kv_memory="24M", prefill_args=["--context-max", "512"],
                 decode_args=["--context-max", "512"],
                 router_args=["--context-max", "512", "--queue-ms", "60000"]) as c:
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            ask = lambda i: c.chat(f"Tell me about the number {i}.", max_tokens=60 + i,
                                   temperature=0, ignore_eos=True)
            for i, reply in enumerate(pool.map(ask, range(32))):
                assert reply.usage["completion_tokens"] == 60 + i


if __name__ == "__main__":
    main(__doc__)
