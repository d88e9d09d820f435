"""A whole cluster over hosts, each process on one of its own, under load all the time: it serves, grows
and shrinks, loses links and hosts, and is parted from etcd. Whatever happens, each answer is the
undisturbed one, and none is an error, since somebody is always there who can serve.

Hosts are network namespaces (tests/hosts.py), so nothing goes by shared memory."""
import functools
import http.client
import json
import os
import signal
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import main, shared, test, wait_until
from hosts import HostCluster
from load import Load, ask, check_at_rest, damaged, mixed_requests

ROUTERS = ("router", "router-2")
LONG = "The ferrymen of the two rivers kept a book of every crossing in fog. " * 40
STORED = "A list of harbours by depth, with the year in which each was first dredged. " * 8
BLOCK = 16  # tokens
ARGS = {"router": ["--allow-placement", "--self-prefill-tokens", "0", "--queue-ms", "30000"],
        "kvstore": ["--role", "both", "--capacity", "64M", "--replicas", "2", "--leader-lease-ms",
                    "2000"],
        "prefill": ["--kv-memory", "96M", "--threads", "1"],
        "decode": ["--kv-memory", "96M", "--threads", "1"]}


class Whole(HostCluster):
    """Two routers, two of each node, three stores that may lead, three etcds."""

    def __init__(self, options):
        super().__init__(options, routers=2, prefill=2, decode=2, kvstore=3, etcd=3, args=ARGS)
        self.load = Load(self, mixed_requests(tokens=(10, 14, 24)), clients=3, salts=2,
                         fresh=0.4)
        self.salts = 0

    def salt(self):
        """One that nobody has used."""
        self.salts += 1
        return f"own{self.salts}"

    def outcomes(self):
        """Requests that ended, by how, over the routers."""
        total = {}
        for router in ROUTERS:
            for name, value in self.metrics(router).items():
                if name.startswith("tandem_router_requests_total"):
                    outcome = name.split('"')[1]
                    total[outcome] = total.get(outcome, 0) + int(value)
        return total

    def names_routers(self):
        """Whether etcd does, if it answers at all."""
        try:
            return self.in_etcd() == sorted(ROUTERS)
        except OSError:
            return False

    def etcd_follows(self, name):
        """Whether it answers, and knows who leads."""
        try:
            return "leader" in self.etcd("/v3/maintenance/status", {}, to=name)
        except OSError:
            return False

    def sum_of(self, series, role):
        return sum(self.metrics(i)[series] for i in self.ids(role) if self.alive(i))

    def stored(self, name):
        """A prompt of which every block lies on two stores; its salt and answer."""
        wanted = None
        for _ in range(10):
            salt = self.salt()
            before = self.sum_of('tandem_kvstore_puts_total{result="stored"}', "kvstore")
            answer = self.ask_at(name, salt)
            wanted = before + 2 * (answer.usage["prompt_tokens"] // BLOCK)
            try:
                wait_until(lambda: self.sum_of('tandem_kvstore_puts_total{result="stored"}',
                                               "kvstore") >= wanted, 3, "stored")
                return salt, answer
            except AssertionError:
                continue  # a leader that is new, or a segment that has gone meanwhile
        raise AssertionError("nothing is stored")

    def ask_at(self, node, salt, prompt=STORED, router="router", **more):
        body = {"model": self.model, "prompt": prompt, "max_tokens": 6, "temperature": 0,
                "ignore_eos": True, "cache_salt": salt, "tandem": {"prefill": node}, **more}
        return self.request("POST", "/v1/completions", body, to=router, check=True)


def cluster(options):
    return shared(options, make=Whole)


def seen(answer):
    return answer.choices, answer.json["tandem"]["tokens"], answer.json["tandem"]["logits_xxh"]


def cached(answer):
    return answer.usage["prompt_tokens_details"]["cached_tokens"]


def check_hit(c, node, salt, first):
    """Its blocks come from the store; the answer is the same, bit for bit."""
    again = c.ask_at(node, salt)
    assert seen(again) == seen(first)
    assert cached(again) >= first.usage["prompt_tokens"] // BLOCK * BLOCK - BLOCK, again.usage


def unharmed(function):
    """For a test of the shared cluster: whatever it does, nothing is held afterwards, and no request that ended
    meanwhile has failed."""
    @functools.wraps(function)
    def run(options):
        c = cluster(options)
        before = c.outcomes()
        function(c)
        check_at_rest(c)
        now = c.outcomes()
        bad = {outcome: now[outcome] - before.get(outcome, 0) for outcome in now
               if outcome not in ("ok", "client_gone") and now[outcome] != before.get(outcome, 0)}
        assert not bad, bad
    return run


@test
def test_i1_whole_cluster_over_hosts_serves(options):
    c = cluster(options)
    with c.load as load:
        load.wait_answers(12)
        salt, first = c.stored("prefill-1")
        fetched = c.metrics("prefill-2")['tandem_prefill_prompt_tokens_total{source="store"}']
        check_hit(c, "prefill-2", salt, first)
        assert c.metrics("prefill-2")['tandem_prefill_prompt_tokens_total{source="store"}'] > fetched
    check_at_rest(c)
    assert not any(damaged(c).values()), damaged(c)
    assert set(outcome for outcome, count in c.outcomes().items() if count) == {"ok"}
    for role in ("prefill", "decode", "kvstore"):
        for process_id in c.ids(role):
            assert "carrier=shm" not in c.log(process_id), process_id
            if role != "prefill":
                tcp = c.metrics(process_id)[f'tandem_{role}_transfer_bytes_total{{carrier="tcp"}}']
                assert tcp > 0, process_id


@test
@unharmed
def test_i9_nodes_join_and_leave_under_load(c):
    def swap(old, new):
        """New ones take work, then old ones finish theirs and leave."""
        for process_id in new:
            c.add(process_id.split("-")[0], process_id)
        c.wait_known()
        for process_id in new:
            role = process_id.split("-")[0]
            served = f'tandem_{role}_requests_total{{outcome="ok"}}'
            wait_until(lambda: c.metrics(process_id)[served] > 0, 30, f"{process_id} gets work")
        for process_id in old:
            c.kill(process_id, signal.SIGTERM)
        for process_id in old:
            assert c.running[process_id].wait(timeout=30) == 0
            assert "why=drained" in c.log(process_id)
            c.remove(process_id)
        c.wait_known()
        load.wait_answers(6)

    with c.load as load:
        swap(["prefill-1", "decode-1"], ["prefill-3", "decode-3"])
        swap(["prefill-3", "decode-3"], ["prefill-1", "decode-1"])


@test
@unharmed
def test_i2_a_link_is_cut_while_blocks_move(c):
    """What was under way comes late, when the link is up again: it changes nothing of anybody's."""
    expected = seen(c.ask_at("prefill-2", c.salt(), LONG))
    with c.load as load:
        c.host("prefill-1").slow("48mbit")  # a prompt's blocks take a second or two
        got = {}
        asking = threading.Thread(target=lambda: got.update(
            answer=c.ask_at("prefill-1", c.salt(), LONG)))
        asking.start()
        sent = c.metrics("prefill-1")["tandem_prefill_transfer_answered_bytes_total"]
        wait_until(lambda: c.metrics("prefill-1")["tandem_prefill_transfer_answered_bytes_total"] >
                   sent + (4 << 20), 20, "blocks move")
        c.host("prefill-1").cut()
        c.wait_known(prefill=1)
        asking.join()
        assert seen(got["answer"]) == expected and \
            got["answer"].headers["x-tandem-prefill"] == "prefill-2"
        load.wait_answers(5)
        c.host("prefill-1").mend()
        c.wait_known()
        c.host("prefill-1").hasten()
        load.wait_answers(5)
        again = c.ask_at("prefill-1", c.salt(), LONG)
        assert seen(again) == expected and again.headers["x-tandem-prefill"] == "prefill-1"


@test
@unharmed
def test_i9_a_decode_host_is_lost_with_its_streams(c):
    bodies = [{"prompt": STORED, "max_tokens": 90, "temperature": 0.8, "seed": number, "n": 1 +
               number % 2, "logprobs": 1, "ignore_eos": True, "stream": True,
               "speculation": {"drafter": "none"}} for number in range(2)]
    expected = [ask(c, "router", {**body, "cache_salt": "undisturbed", "tandem":
                                  {"decode": "decode-2"}}) for body in bodies]
    begun = threading.Semaphore(0)
    got = {}
    failovers = c.sum_of("tandem_router_failovers_total", "router")

    def follow(number):
        def on_event(count):
            if count == 8:
                begun.release()
        got[number] = ask(c, ROUTERS[number % 2], {**bodies[number], "cache_salt": f"lost{number}",
                                                   "tandem": {"decode": "decode-1"}},
                          on_event=on_event)

    with c.load as load:
        threads = [threading.Thread(target=follow, args=(number,)) for number in range(len(bodies))]
        for thread in threads:
            thread.start()
        for _ in threads:
            assert begun.acquire(timeout=30)
        c.lose("decode-1")
        for thread in threads:
            thread.join()
        for number, answer in enumerate(expected):
            assert got.get(number) == answer, (number, got.get(number), answer)
        assert c.sum_of("tandem_router_failovers_total", "router") >= failovers + len(bodies)
        load.wait_answers(5)
        c.recover("decode-1")
        c.wait_known()


@test
@unharmed
def test_f9_the_store_masters_host_is_lost(c):
    with c.load as load:
        salt, first = c.stored("prefill-1")
        old = c.store_leader()
        c.lose(old)
        new = wait_until(c.store_leader, 20, "another store leads")
        assert new != old
        wait_until(lambda: c.metrics(new)["tandem_kvstore_segments_telling"] == 0 and
                   c.metrics(new)["tandem_kvstore_keys"] > 0, 20, "it knows what there is")
        wait_until(lambda: cached(c.ask_at("prefill-2", salt)) > 0, 10, "it is asked")
        check_hit(c, "prefill-2", salt, first)
        load.wait_answers(5)
        c.recover(old)
        c.wait_known()


@test
@unharmed
def test_f9_etcds_leader_is_killed(c):
    with c.load as load:
        old = wait_until(c.etcd_leader, 20, "an etcd leads")
        c.end(old)
        load.wait_answers(5)
        new = wait_until(c.etcd_leader, 20, "another etcd leads")
        assert new != old
        wait_until(c.names_routers, 20, "it names both routers")
        wait_until(c.store_leader, 20, "a store leads")
        salt, first = c.stored("prefill-1")
        check_hit(c, "prefill-2", salt, first)
        c.start(old)
        wait_until(lambda: c.etcd_follows(old), 20, "it is one of them again")


@test
@unharmed
def test_f9_routers_are_parted_from_etcd(c):
    """It forgets them, and their nodes do not: they hear them."""
    with c.load as load:
        c.network.part(ROUTERS, c.ids("etcd"))
        # This thread sees etcd: it is on a host of its own.
        wait_until(lambda: c.in_etcd() == [], 20, "etcd has forgotten the routers")
        load.wait_answers(8)
        c.wait_known()
        c.network.unite(ROUTERS, c.ids("etcd"))
        wait_until(c.names_routers, 20, "it names them again")
        load.wait_answers(5)


@test
@unharmed
def test_i1_narrow_links_change_times_alone(c):
    def timed():
        began = time.monotonic()
        return seen(c.ask_at("prefill-1", c.salt(), LONG)), time.monotonic() - began

    def handed(decode):
        return c.ask_at("prefill-1", "handed", LONG, tandem={"prefill": "prefill-1", "decode": decode})

    before = damaged(c)
    expected, quick = timed()
    # All blocks at once, more than come while a peer's silence is borne: slow is not silent.
    assert seen(handed("decode-1")) == expected
    retries = c.sum_of("tandem_router_retries_total", "router")
    c.host("prefill-1").slow("24mbit")
    began = time.monotonic()
    assert seen(handed("decode-2")) == expected
    c.host("prefill-1").hasten()
    assert time.monotonic() - began > 2 and cached(handed("decode-2")) > 0
    assert c.sum_of("tandem_router_retries_total", "router") == retries
    narrow = c.ids("prefill") + c.ids("kvstore")
    with c.load as load:
        for process_id in narrow:
            c.host(process_id).slow("80mbit")
        got, slow = timed()
        assert got == expected
        load.wait_answers(10)
        for process_id in narrow:
            c.host(process_id).hasten()
        load.wait_answers(5)
    assert damaged(c) == before
    print(f"    a long prompt: {quick:.1f} s, behind narrow links and under load {slow:.1f} s")


def begin(c, more):
    """A connection on which a long prompt is asked for."""
    host, port = c.processes["router"]["http"].rsplit(":", 1)
    client = http.client.HTTPConnection(host, int(port), timeout=30)
    client.request("POST", "/v1/completions", json.dumps({
        "model": c.model, "prompt": LONG, "max_tokens": 6, **more}))
    return client


@test
def test_i5_blocks_come_back_at_once_from_a_slow_link_whose_request_ended(options):
    """A slow link may take as long as it likes, but only for who still waits for what it brings."""
    c = cluster(options)
    before = damaged(c)
    c.ask_at("prefill-1", "left", LONG, tandem={"prefill": "prefill-1", "decode": "decode-1"})
    c.host("prefill-1").slow("8mbit")  # it takes 15 s then
    try:
        client = begin(c, {"cache_salt": "left", "tandem": {"prefill": "prefill-1", "decode": "decode-2"}})
        wait_until(lambda: c.held_blocks(["decode-2"]) > 20, 10, "blocks come")
        client.close()
        wait_until(lambda: c.held_blocks(["decode-2"]) == 0, 4, "they are free again")
    finally:
        c.host("prefill-1").hasten()
    check_at_rest(c)
    assert damaged(c) == before


if __name__ == "__main__":
    main(__doc__)
