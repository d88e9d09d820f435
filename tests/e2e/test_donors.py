"""Prefill and decode nodes give memory to the store: it holds others' blocks, and is gone with its
node without harm."""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import Cluster, main, test, wait_until

PROMPT = "The cartographer drew the coast again, for the river had moved, and wrote beside it: " * 12


def blocks(c, node):
    series = c.metrics(node)
    return {state: series[f'tandem_kvstore_kv_blocks{{state="{state}"}}']
            for state in ("free", "cached", "active")}


def stored(c, node):
    counts = blocks(c, node)
    return counts["cached"] + counts["active"]


def ask(c, prefill, salt="", decode="decode-1"):
    reply = c.complete(PROMPT, max_tokens=8, temperature=0, cache_salt=salt,
                       tandem={"prefill": prefill, "decode": decode})
    return reply.text, reply.usage["prompt_tokens_details"]["cached_tokens"]


def open_cluster(options):
    """The one store process is a master without memory: all of it is donated."""
    return Cluster(options.bin, prefill=2, decode=1, kvstore=1, kv_memory="64M", donate="32M",
                   args_of={"kvstore-1": ["--role", "master"]}, router_args=["--allow-placement"])


@test
def test_donated_memory_is_the_store(options):
    with open_cluster(options) as c:
        donors = ("prefill-1", "prefill-2", "decode-1")
        for node in donors:
            assert blocks(c, node)["free"] == 32 * 1024 * 1024 // 368640
        found = []
        for salt in ("", "again", "and again"):  # a store that answers late is a miss
            before = sum(stored(c, node) for node in donors)
            text, cached = ask(c, "prefill-1", salt)
            assert cached == 0
            wait_until(lambda: sum(stored(c, node) for node in donors) >= before + 10, 10,
                       "blocks were stored")
            # Another node, which has computed nothing of it: its peers' memory has it.
            other, cached = ask(c, "prefill-2", salt)
            assert other == text
            found.append(cached)
        assert max(found) > 100, found
        for salt in "abcdef":  # the master spreads them
            ask(c, "prefill-1", salt)
        wait_until(lambda: all(stored(c, node) > 0 for node in donors), 10, "every donor holds some")


@test
def test_donor_dies_with_its_node_and_harms_nobody(options):
    with open_cluster(options) as c:
        texts = {salt: ask(c, "prefill-1", salt)[0] for salt in "abcd"}
        wait_until(lambda: stored(c, "prefill-2") > 0, 10, "prefill-2 holds blocks")
        command = c.end("prefill-2")
        for salt, text in texts.items():  # found or computed again: the same
            assert ask(c, "prefill-1", salt)[0] == text
        wait_until(lambda: c.metrics()['tandem_router_nodes{role="kvstore"}'] == 3, 10,
                   "the router knows that the donor is gone")
        c.start("prefill-2", command)
        wait_until(lambda: c.metrics()['tandem_router_nodes{role="kvstore"}'] == 4 and
                   c.metrics()['tandem_router_nodes{role="prefill"}'] == 2, 60,
                   "and that both are back")
        assert ask(c, "prefill-2", "a")[0] == texts["a"]


if __name__ == "__main__":
    main(__doc__)
