"""The router's index of blocks is what the nodes and the store have (I7): after requests, after
evictions, after a node's or the router's restart; nothing of a life that is over stays in it (F10)."""
import json
import os
import signal
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import Cluster, main, run_together, test, wait_until

STORY = "The archivist of the lake counted every boat that came home before the ice. "
OF_NODE = {"prefill": "tandem_prefill_kv_indexed_blocks",
           "decode": "tandem_decode_kv_indexed_blocks", "kvstore": "tandem_kvstore_keys"}


class Indexed(Cluster):
    def ctl(self, command):
        keys = os.path.join(self.run_dir, "admin")
        done = subprocess.run([os.path.join(self.bin, "tandemctl"), "--keys", keys, "--json", command],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False, timeout=30)
        assert done.returncode == 0, done.stderr.decode()
        return json.loads(done.stdout)

    def nodes(self):
        return {node["id"]: node for node in self.ctl("nodes")["nodes"]}

    def counts(self):
        return self.ctl("status")["index"]

    def says(self, node):
        """Blocks that can be found there, as it counts them itself."""
        return self.metrics(node)[OF_NODE[node.split("-")[0]]]

    def differs(self):
        """What the router knows of each process and what that says, where it is not the same."""
        nodes = self.nodes()
        found = {name: (node["index"], node["index_blocks"], self.says(name))
                 for name, node in nodes.items()
                 if self.alive(name) and (node["role"] != "kvstore" or node["store_master"])}
        return {name: what for name, what in found.items()
                if what[0] != "exact" or what[1] != what[2]}

    def wait_equal(self):
        """Equal in number, and by the digests of keys that each word of events carries."""
        wait_until(lambda: not self.differs(), 15, "the index equals its nodes")
        assert self.counts()["mismatches"] == 0, self.counts()

    def blocks(self, node):
        return self.nodes()[node]["index_blocks"]


def cluster(options, **more):
    return Indexed(options.bin, **{"prefill": 1, "decode": 1, "kvstore": 1, "kv_memory": "24M",
                                   "router_args": ["--queue-ms", "60000"], **more})


@test
def test_i7_index_equals_its_nodes_after_requests_and_evictions(options):
    with cluster(options) as c:
        c.wait_equal()
        assert c.blocks("prefill-1") == 0
        c.complete(STORY * 8, max_tokens=20)
        wait_until(lambda: c.blocks("prefill-1") > 0 and c.blocks("kvstore-1") > 0, 10,
                   "events of the first request")
        c.wait_equal()
        total = c.nodes()["prefill-1"]["total_blocks"]
        prompts = [(f"{i}. {STORY * 12}",) for i in range(12)]
        run_together(prompts, lambda prompt: c.complete(prompt, max_tokens=4))
        events = c.counts()["events"]
        assert events > total, (events, total)  # more came than there is room for: some went
        c.wait_equal()
        assert 0 < c.blocks("prefill-1") <= total
        assert c.counts()["gaps"] == 0, c.counts()


@test
def test_f10_a_restart_in_place_leaves_nothing_of_the_old_life(options):
    with cluster(options, kv_memory="64M") as c:
        c.complete(STORY * 8, max_tokens=20)
        wait_until(lambda: c.blocks("prefill-1") > 0, 10, "events")
        c.wait_equal()
        before = c.nodes()["prefill-1"]
        c.restart("prefill-1")
        wait_until(lambda: c.nodes()["prefill-1"]["incarnation"] != before["incarnation"] and
                   c.nodes()["prefill-1"]["state"] == "live", 15, "the new life")
        c.wait_equal()
        assert c.blocks("prefill-1") == 0
        c.complete(STORY * 8, max_tokens=20)
        wait_until(lambda: c.blocks("prefill-1") == before["index_blocks"], 10, "the same again")
        c.wait_equal()


@test
def test_i7_a_dead_node_is_forgotten(options):
    with cluster(options, kv_memory="64M", prefill=2) as c:
        c.complete(STORY * 8, max_tokens=2)
        wait_until(lambda: c.blocks("prefill-1") + c.blocks("prefill-2") > 0, 10, "events")
        holder = "prefill-1" if c.blocks("prefill-1") > 0 else "prefill-2"
        c.end(holder)
        wait_until(lambda: c.nodes()[holder]["state"] == "dead", 10, "its death is known")
        assert c.nodes()[holder]["index_blocks"] == 0
        c.wait_equal()


@test
def test_i7_a_new_router_learns_all_there_is(options):
    with cluster(options, kv_memory="64M") as c:
        c.complete(STORY * 8, max_tokens=20)
        wait_until(lambda: c.blocks("prefill-1") > 0 and c.blocks("kvstore-1") > 0, 10, "events")
        c.wait_equal()
        before = {name: node["index_blocks"] for name, node in c.nodes().items()}
        c.restart("router")
        wait_until(lambda: len(c.nodes()) == 3, 20, "the nodes are back")
        c.wait_equal()
        assert {name: node["index_blocks"] for name, node in c.nodes().items()} == before


@test
def test_f10_a_node_declared_dead_comes_back_with_what_it_has(options):
    """A new life in the same process: the old one's blocks are told anew, or they are not known."""
    with cluster(options, kv_memory="64M") as c:
        c.complete(STORY * 8, max_tokens=20)
        c.wait_equal()
        c.kill("prefill-1", signal.SIGSTOP)
        wait_until(lambda: c.nodes()["prefill-1"]["state"] == "dead", 10, "declared dead")
        assert c.nodes()["prefill-1"]["index_blocks"] == 0
        c.kill("prefill-1", signal.SIGCONT)
        wait_until(lambda: c.nodes()["prefill-1"]["state"] == "live", 10, "alive again")
        c.wait_equal()
        assert c.blocks("prefill-1") > 0


@test
def test_i7_each_of_several_routers_knows_all_nodes(options):
    with cluster(options, kv_memory="64M", routers=2) as c:
        c.complete(STORY * 8, max_tokens=20)  # by the first one
        for router in ("router", "router-2"):
            wait_until(lambda to=router: c.metrics(to)["tandem_router_index_events_total"] > 0 and
                       c.metrics(to)['tandem_router_index_nodes{state="exact"}'] == 3, 15,
                       f"{router} knows them all")
            assert c.metrics(router)["tandem_router_index_mismatches_total"] == 0
        c.wait_equal()


@test
def test_i7_another_master_of_the_store_tells_what_it_knows(options):
    with cluster(options, kv_memory="64M", kvstore=2, etcd=True,
                 kvstore_args=["--capacity", "64M", "--replicas", "2",
                               "--leader-lease-ms", "2000"]) as c:
        def master():
            found = [name for name, node in c.nodes().items()
                     if node["store_master"] and node["state"] == "live"]
            return found[0] if found else None

        wait_until(master, 20, "a master")
        first = master()
        salts = (f"s{i}" for i in range(1000))
        wait_until(lambda: c.complete(STORY * 8, max_tokens=2, cache_salt=next(salts)) and
                   c.blocks(first) > 0, 20, "the store is used")
        c.wait_at_rest()
        c.wait_equal()
        standby = "kvstore-2" if first == "kvstore-1" else "kvstore-1"
        spare = c.nodes()[standby]  # only the master speaks for the store
        assert spare["index"] == "" and spare["index_blocks"] == 0
        c.end(first)
        wait_until(lambda: master() == standby, 20, "the other leads")
        wait_until(lambda: c.blocks(first) == 0, 5, "what the first one told is forgotten")
        wait_until(lambda: c.blocks(standby) > 0, 20, "what its segments told it")
        c.wait_equal()


if __name__ == "__main__":
    sys.exit(main(__doc__))
