"""The store's master falls, or etcd does: another leads, blocks stay, and no request fails (F9)."""
import http.client
import itertools
import os
import signal
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import Cluster, main, test, wait_until

PROMPT = "A list of harbours by depth, with the year in which each of them was first dredged. " * 8
BLOCK = 16  # tokens
LEASE_MS = 2000
STORES = ("kvstore-1", "kvstore-2", "kvstore-3")


class HaCluster(Cluster):
    """Three stores that may lead, each block on two of them; a second prefill node knows nothing."""

    def __init__(self, options, lease_ms=LEASE_MS, **arguments):
        super().__init__(options.bin, prefill=2, kvstore=3, etcd=True, kv_memory="256M", threads=1,
                         router_args=["--allow-placement"],
                         kvstore_args=["--capacity", "64M", "--replicas", "2",
                                       "--leader-lease-ms", str(lease_ms)], **arguments)
        self.frozen = set()
        self.salts = {}  # of what was stored, by the name that tests have for it

    def __enter__(self):
        super().__enter__()
        wait_until(self.leader, 20, "a leader")
        # The nodes have heard of it when a prompt of nobody's is stored.
        wait_until(lambda: self.ask(f"x{time.monotonic_ns()}", "prefill-1") and
                   self.of_leader('puts_total{result="stored"}') > 0, 20, "the store is used")
        return self

    def freeze(self, process_id):
        self.kill(process_id, signal.SIGSTOP)
        self.frozen.add(process_id)

    def wake(self, process_id):
        self.kill(process_id, signal.SIGCONT)
        self.frozen.discard(process_id)

    def store(self, process_id, name):
        return self.metrics(process_id).get(f"tandem_kvstore_{name}", 0)

    def leads(self, process_id):
        if process_id in self.frozen or not self.alive(process_id):
            return False
        try:
            return self.store(process_id, "is_leader") == 1
        except (OSError, http.client.HTTPException):
            return False  # it is just ending

    def leaders(self):
        return [i for i in STORES if self.leads(i)]

    def leader(self):
        found = self.leaders()
        assert len(found) < 2, found
        return found[0] if found else None

    def of_leader(self, name):
        leader = self.leader()
        return self.store(leader, name) if leader else -1

    def ask(self, salt, node):
        return self.complete(PROMPT, max_tokens=8, temperature=0, ignore_eos=True,
                             cache_salt=self.salts.get(salt, salt),
                             tandem={"prefill": node})

    def put(self, salt, copies=2):
        """Asks, and waits until every block of the prompt lies on two segments. One that falls at
        that moment has taken its copies along, and what is cached is not put again: then another
        salt is tried."""
        attempts = itertools.count()

        def attempt():
            self.salts[salt] = f"{salt} {next(attempts)}"
            return self.try_put(salt, copies)

        return wait_until(attempt, 30, f"{salt} stored")

    def try_put(self, salt, copies):
        before = self.of_leader('puts_total{result="stored"}')
        reply = self.ask(f"{salt}", "prefill-1")
        want = before + copies * (reply.usage["prompt_tokens"] // BLOCK)
        try:
            wait_until(lambda: self.of_leader('puts_total{result="stored"}') >= want, 3, "stored")
        except AssertionError:
            return None
        return reply

    def put_once(self, salt):
        """The same where one segment takes all that is put: a copy of each block."""
        return self.put(salt, copies=1)

    def cached_blocks(self):
        return sum(self.store(i, 'kv_blocks{state="cached"}') for i in STORES if self.alive(i))

    def wait_complete(self):
        """A leader that knows every block of every segment, and no block that is none's."""
        wait_until(lambda: self.leader() and self.of_leader("segments_telling") == 0 and
                   self.of_leader("replicas") == self.cached_blocks() > 0, 20,
                   "the leader knows what segments hold, no more and no less")

    def check_no_corruption(self):
        for process_id in STORES + ("prefill-1", "prefill-2", "decode-1"):
            if self.alive(process_id):
                role = self.processes[process_id]["role"]
                assert self.metrics(process_id)[f"tandem_{role}_checksum_failures_total"] == 0


def cached(reply):
    return reply.usage["prompt_tokens_details"]["cached_tokens"]


def check_hit(c, salt, first):
    """The prompt's blocks come from the store, with the very same answer."""
    full = first.usage["prompt_tokens"] // BLOCK * BLOCK
    again = c.ask(salt, "prefill-2")
    assert again.text == first.text
    assert cached(again) >= full - BLOCK, (cached(again), full)


def wait_served(c, salt, first):
    """Until the nodes have heard of the leader."""
    wait_until(lambda: cached(c.ask(salt, "prefill-2")) > 0, 10, "lookups reach the leader")
    del first


@test
def test_f9_killed_leader_is_replaced_and_its_blocks_are_hits(options):
    with HaCluster(options) as c:
        first = c.put("one")
        second = c.put("two")
        old = c.leader()
        c.kill(old)
        new = wait_until(c.leader, 20, "a new leader")
        assert new != old
        c.wait_complete()
        wait_until(lambda: c.ask("probe", "prefill-2").text == first.text and
                   c.store(new, 'lookup_blocks_total{result="miss"}') > 0, 10, "it is asked")
        check_hit(c, "one", first)
        check_hit(c, "two", second)
        third = c.put("three")
        check_hit(c, "three", third)
        c.check_no_corruption()


@test
def test_f9_leader_that_ends_hands_over_at_once(options):
    with HaCluster(options, lease_ms=20000) as c:
        first = c.put("one")
        began = time.monotonic()
        c.end(c.leader(), signal.SIGTERM)
        wait_until(c.leader, 30, "a new leader")
        assert time.monotonic() - began < 10, "it does not wait for the lease"
        c.wait_complete()
        wait_until(lambda: c.ask("probe", "prefill-2").text == first.text and
                   c.of_leader('lookup_blocks_total{result="miss"}') > 0, 10, "it is asked")
        check_hit(c, "one", first)


@test
def test_f9_frozen_leader_is_replaced_and_does_no_harm_when_it_wakes(options):
    with HaCluster(options) as c:
        first = c.put("one")
        old = c.leader()
        c.freeze(old)
        for i in range(3):  # offers that wait in its socket
            assert c.ask(f"while{i}", "prefill-1").text == first.text
        wait_until(c.leader, 20, "a new leader")
        third = c.put("three")
        c.wake(old)
        wait_until(lambda: c.store(old, "leader_term") == 0, 10, "it has stepped down")
        wait_until(lambda: 'msg="standby"' in c.log(old), 10, "it is known as a standby")
        c.put("four")
        c.wait_complete()
        assert c.leaders() == [c.leader()] and c.leader() != old
        check_hit(c, "one", first)
        check_hit(c, "three", third)
        c.check_no_corruption()


@test
def test_f9_segment_that_freezes_while_it_tells_holds_up_nobody(options):
    # It is mounted by the first leader, then by the second: there it stops.
    with HaCluster(options, args_of={"kvstore-3": ["--role", "segment", "--fault",
                                                   "segment_manifest:stop:2"]}) as c:
        first = c.put("one")
        c.frozen.add("kvstore-3")
        c.kill(c.leader())
        wait_until(c.leader, 20, "a new leader")
        wait_until(lambda: c.of_leader("segments_telling") == 0, 20, "it waits for nobody")
        second = c.put_once("two")  # it stores on
        assert second.text == first.text
        again = c.ask("two", "prefill-2")
        assert again.text == first.text and cached(again) > 0


class Traffic(threading.Thread):
    """Requests one after the other, old prompts and new ones, until stop()."""

    def __init__(self, c, expected):
        super().__init__(daemon=True)
        self.c = c
        self.expected = expected
        self.ending = threading.Event()
        self.count = 0
        self.error = None

    def run(self):
        while not self.ending.is_set():
            try:
                reply = self.c.ask(f"t{self.count}", f"prefill-{self.count % 2 + 1}")
                assert reply.text == self.expected
            except Exception as error:  # whatever it is, it is the test's failure
                self.error = error
                return
            self.count += 1

    def stop(self):
        self.ending.set()
        self.join()
        if self.error is not None:
            raise self.error
        print(f"    {self.count} requests, none failed")
        assert self.count > 0, "a request at least was made"


def outage(options, begin, end):
    """etcd away for a while under traffic."""
    with HaCluster(options) as c:
        first = c.put("one")
        pids = {i: c.processes[i]["pid"] for i in c.processes if i != "etcd"}
        traffic = Traffic(c, first.text)
        traffic.start()
        started = time.monotonic()
        state = begin(c)
        wait_until(lambda: not c.leaders(), 20, "nobody leads without etcd")
        again = c.ask("one", "prefill-2")
        assert again.text == first.text and cached(again) > 0, "lookups go on"
        wait_until(lambda: time.monotonic() - started > options.outage_s, options.outage_s + 1,
                   "the outage is over")
        end(c, state)
        wait_until(c.leader, 20, "a leader again")
        traffic.stop()
        second = c.put("two")
        c.wait_complete()
        check_hit(c, "two", second)
        c.check_no_corruption()
        assert pids == {i: c.processes[i]["pid"] for i in pids} and all(c.alive(i) for i in pids)


@test
def test_f9_etcd_frozen_under_traffic(options):
    outage(options, lambda c: c.kill("etcd", signal.SIGSTOP),
           lambda c, _: c.kill("etcd", signal.SIGCONT))


@test
def test_f9_etcd_killed_under_traffic(options):
    outage(options, lambda c: c.end("etcd"), lambda c, command: c.start("etcd", command))


if __name__ == "__main__":
    main(__doc__, lambda parser: parser.add_argument("--outage-s", type=float, default=8,
                                                     help="how long etcd is away"))
