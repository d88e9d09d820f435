"""A whole cluster under load, two routers in front, while each process in turn is killed, frozen or
drained, and comes back.

What must hold: every answer that a client gets is, token for token, the clean run's; none is an error,
since there is always another process of the role; a client whose router falls asks the other one; at
rest nobody holds anything."""
import os
import random
import signal
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import Cluster
from load import ROUTERS, Load, check_at_rest, mixed_requests

ACTIONS = ("kill", "freeze", "drain")
FROZEN_S = 3.0  # longer than a node's silence is borne, shorter than a ticket's lease
CLIENTS = 6
# Refusals before anything was sent: of a router that drains, or whose nodes have not come back yet.
TRY_ELSEWHERE = (503,)


class Turns:
    """The cluster, its load, and what went wrong."""

    def __init__(self, options, seed):
        self.cluster = Cluster(options.bin, routers=2, prefill=2, decode=3, kvstore=2, threads=1,
                               kv_memory="256M", kvstore_args=["--capacity", "64M", "--replicas", "2"],
                               router_args=["--allow-placement", "--queue-ms", "60000", "--drain-ms",
                                            "200000" if "san-" in options.bin else "20000"])
        self.random = random.Random(seed)
        self.load = Load(self.cluster, mixed_requests(), CLIENTS, elsewhere=TRY_ELSEWHERE)

    def fall(self, process_id, action):
        c = self.cluster
        if action == "freeze":
            c.kill(process_id, signal.SIGSTOP)
            self.load.done.wait(FROZEN_S)  # a frozen process is not waited for: this is its length
            c.kill(process_id, signal.SIGCONT)
        else:
            c.restart(process_id, signal.SIGKILL if action == "kill" else signal.SIGTERM)
        c.wait_known()
        self.load.wait_answers(CLIENTS, 120, f"answers go on after {action} of {process_id}")

    def run(self, turns):
        c = self.cluster
        with self.load as load:
            for process_id, action in turns:
                self.fall(process_id, action)
                print(f"    {action} {process_id}: {load.answered} answers", flush=True)
        check_at_rest(c)
        for router in ROUTERS:
            series = c.metrics(router)
            failed = {name: value for name, value in series.items() if value > 0 and
                      name.startswith("tandem_router_requests_total") and
                      not name.endswith(('outcome="ok"}', 'outcome="client_gone"}'))}
            # Of a router that drains, or that has just come back and knows no node yet.
            assert all("upstream_error" in name or "shutdown" in name for name in failed), failed


def all_turns(cluster):
    """Every process with every action."""
    return [(process_id, action) for action in ACTIONS for process_id in cluster.processes
            if process_id != "etcd"]


def run_all(options, seed):
    t = Turns(options, seed)
    with t.cluster as c:
        turns = all_turns(c)
        t.random.shuffle(turns)
        t.run(turns)


def run_some(options, seed):
    """Every process once; every action with every role."""
    t = Turns(options, seed)
    with t.cluster as c:
        ids = [process_id for process_id in c.processes if process_id != "etcd"]
        t.run([(process_id, ACTIONS[(i + seed) % len(ACTIONS)]) for i, process_id in enumerate(ids)])
