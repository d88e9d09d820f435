"""What the way from prefill to decode costs: transfers hide behind computing, and a store that does not
answer delays nobody. Everything is counted, nothing timed."""
import itertools
import os
import signal
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import Cluster, main, test

BLOCK = 16
BLOCK_BYTES = 368640
serials = itertools.count()


def handoff_bytes(c, when):
    return c.metrics("decode-1")[f'tandem_decode_handoff_bytes_total{{when="{when}"}}']


@test
def test_most_of_a_long_prompt_is_there_before_it_is_ready(options):
    for carrier in ({}, {"UCX_TLS": "tcp"}):
        with Cluster(options.bin, kvstore=0, prefill_args=["--chunk-tokens", "64"],
                     env=carrier) as c:
            ids = c.request("POST", "/tokenize", {"prompt": "The tide comes in and goes out. " * 80},
                            check=True).json["tokens"][:520]
            assert len(ids) == 520
            c.complete(ids, max_tokens=2, temperature=0, ignore_eos=True)
            early, late = handoff_bytes(c, "early"), handoff_bytes(c, "late")
            blocks = -(-len(ids) // BLOCK)
            assert early + late == blocks * BLOCK_BYTES, (early, late)
            # Eight of nine chunks are whole when the last one begins.
            assert early >= 2 * late, (early, late)


def lookups(c, outcome):
    return c.metrics("prefill-1")[f'tandem_prefill_store_lookups_total{{outcome="{outcome}"}}']


def store_is_known(c):
    """A request asks the store again: it is live, and the nodes have heard of it."""
    before = lookups(c, "hit") + lookups(c, "miss")
    ask(c)
    return lookups(c, "hit") + lookups(c, "miss") > before


def ask(c):
    """A prompt that no cache knows: its salt is new."""
    return c.complete("A lamp burns in the window of the house at the end of the road. " * 2,
                      max_tokens=2, temperature=0, cache_salt=f"salt{next(serials)}").text


@test
def test_a_stopped_store_is_waited_for_once(options):
    with Cluster(options.bin) as c:
        expected = ask(c)
        stops = 0
        # A stopped store is declared dead after two seconds, and then not asked at all: on a slow
        # machine that may be before the second request.
        while lookups(c, "skipped") == 0 and stops < 10:
            c.wait_until(lambda: store_is_known(c), 30, "the store is asked again")
            c.kill("kvstore-1", signal.SIGSTOP)
            try:
                before = lookups(c, "timeout")
                for _ in range(4):
                    assert ask(c) == expected
                assert lookups(c, "timeout") <= before + 1, "one request pays for all"
            finally:
                c.kill("kvstore-1", signal.SIGCONT)
            stops += 1
        assert lookups(c, "skipped") > 0
        c.wait_until(lambda: store_is_known(c), 30, "the store is asked again")
        assert ask(c) == expected


if __name__ == "__main__":
    main(__doc__)
