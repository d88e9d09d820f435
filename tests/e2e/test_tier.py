"""The store's cold tier: blocks that left its memory come back from disk, also after a kill -9, with
the very same output; and a disk that does not answer holds up nobody."""
import os
import shutil
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import Cluster, main, test

CAPACITY = "16M"  # 45 blocks of this model
PROMPT = "A list of lighthouses by height, with the year in which each of them was first lit. " * 14
BLOCK = 16  # tokens


class TierCluster(Cluster):
    """A store with little memory and a disk; two prefill nodes, so that the second knows nothing."""

    def __init__(self, options, *kvstore_args):
        self.tier_dir = tempfile.mkdtemp(prefix="tandem-tier-")
        super().__init__(options.bin, prefill=2, kv_memory="256M",
                         router_args=["--allow-placement"],
                         kvstore_args=["--capacity", CAPACITY, "--lease-ms", "100",
                                       "--evict-from-percent", "50", "--evict-percent", "50",
                                       "--tier-dir",
                                       self.tier_dir, "--tier-bytes", "256M", *kvstore_args])

    def __exit__(self, *error):
        super().__exit__(*error)
        shutil.rmtree(self.tier_dir, ignore_errors=True)

    def ask(self, salt, node):
        return self.complete(PROMPT, max_tokens=8, temperature=0, ignore_eos=True,
                             cache_salt=salt, tandem={"prefill": node})

    def store(self, name):
        return self.metrics("kvstore-1").get(f"tandem_kvstore_{name}", 0)

    def fill(self, count):
        """Prompts of other tenants, one after the other, each wholly stored."""
        for i in range(count):
            before = self.store('puts_total{result="stored"}')
            self.ask(f"fill{time.monotonic_ns()}", "prefill-1")
            self.wait_until(lambda: self.store('puts_total{result="stored"}') >= before + 10, 10,
                            f"filling prompt {i} in the store")

    def from_store(self, node):
        return self.metrics(node)['tandem_prefill_prompt_tokens_total{source="store"}']


def cached(reply):
    return reply.usage["prompt_tokens_details"]["cached_tokens"]


def tokens_of(reply):
    return reply.usage["prompt_tokens"] // BLOCK * BLOCK


SALTS = ("one", "two", "three")  # a busy machine may be slower than a lookup waits, but not thrice


def go_cold(c):
    """Prompts that are asked and then driven out of the store's memory. Returns the first answer."""
    replies = [c.ask(salt, "prefill-1") for salt in SALTS]
    full = tokens_of(replies[0]) // BLOCK
    c.fill(3 + 45 // full)
    c.wait_until(lambda: c.store("cold_keys") >= full * len(SALTS), 10, "blocks on disk")
    return replies[0]


@test
def test_blocks_on_disk_are_a_hit(options):
    with TierCluster(options) as c:
        first = go_cold(c)
        again = [c.ask(salt, "prefill-2") for salt in SALTS]
        assert all(reply.text == first.text for reply in again)
        most = max(cached(reply) for reply in again)
        assert most >= tokens_of(first) - BLOCK, most
        assert c.from_store("prefill-2") == sum(cached(reply) for reply in again)
        assert c.store("promoted_blocks_total") > 0
        assert c.store('tier_gets_total{result="corrupt"}') == 0


@test
def test_blocks_on_disk_survive_a_killed_store(options):
    for io in ("uring", "pread"):
        with TierCluster(options, "--tier-io", io) as c:
            first = go_cold(c)
            full = tokens_of(first) // BLOCK
            c.restart("kvstore-1")
            c.wait_until(lambda: c.store("cold_keys") >= full, 20, "the disk's blocks are known")
            if io == "pread":
                assert c.store("tier_io_uring") == 0
            # The nodes have heard of the new life when a prompt nobody knows is stored again.
            c.wait_until(lambda: c.ask(f"x{time.monotonic_ns()}", "prefill-2")
                         and c.store('puts_total{result="stored"}') > 0, 20, "the store is asked")
            before = c.from_store("prefill-2")
            again = [c.ask(salt, "prefill-2") for salt in SALTS]
            assert all(reply.text == first.text for reply in again)
            hits = sum(cached(reply) for reply in again)
            assert hits > 0, "prefixes come from the disk"
            assert c.from_store("prefill-2") - before == hits
            assert c.store("promoted_blocks_total") > 0


@test
def test_i6_stuck_writes_stop_neither_eviction_nor_serving(options):
    with TierCluster(options, "--fault", "tier_write:hang") as c:
        expected = c.ask("one", "prefill-1").text
        c.fill(10)
        evicted = c.store("evictions_total")
        assert evicted > 45, evicted
        c.fill(3)
        assert c.store("evictions_total") > evicted
        assert c.store('tier_puts_total{result="dropped"}') > 0
        assert c.store('tier_puts_total{result="stored"}') == 0
        # A put goes on after the answer; what is asked for again must have arrived. Of three lookups
        # one finds all: a busy machine may be slower than a lookup waits, but not thrice.
        found = []
        for salt in ("last", "later", "latest"):
            before = c.store('puts_total{result="stored"}')
            last = c.ask(salt, "prefill-1")
            blocks = tokens_of(last) // BLOCK
            c.wait_until(lambda: c.store('puts_total{result="stored"}') >= before + blocks, 10,
                         "the whole prompt in the store")
            again = c.ask(salt, "prefill-2")
            assert again.text == last.text == expected
            found.append(cached(again))
        assert max(found) >= tokens_of(last) - BLOCK, f"memory goes on without the disk: {found}"


@test
def test_i6_stuck_reads_cost_a_lookup_its_wait_only(options):
    with TierCluster(options, "--fault", "tier_read:hang") as c:
        first = go_cold(c)
        again = c.ask(SALTS[0], "prefill-2")
        assert again.text == first.text
        assert cached(again) < tokens_of(first) - BLOCK, "it is computed"
        lookups = c.metrics("prefill-2")
        assert lookups['tandem_prefill_store_lookups_total{outcome="timeout"}'] == 0
        assert c.store('held_lookups_total{result="timeout"}') > 0
        assert c.ask("four", "prefill-1").text == first.text


if __name__ == "__main__":
    main(__doc__)
