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


if __name__ == "__main__":
    main(__doc__)
