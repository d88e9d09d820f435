"""A whole cluster under load, two routers in front, while each process in turn is killed, frozen or
drained, and comes back.

What must hold: every answer that a client gets is, token for token, the clean run's; none is an error,
since there is always another process of the role; a client whose router falls asks the other one; at
rest nobody holds anything."""
import http.client
import os
import random
import signal
import sys
import threading

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import Cluster, HTTPError, choice_text, run_together, wait_until

ROUTERS = ("router", "router-2")
ACTIONS = ("kill", "freeze", "drain")
FROZEN_S = 3.0  # longer than a node's silence is borne, shorter than a ticket's lease
CLIENTS = 6
PROMPTS = ["A walk along the canal takes an hour, and the bridges have names. " * repeat
           for repeat in (2, 9, 20)]
# Refusals before anything was sent: of a router that drains, or whose nodes have not come back yet.
TRY_ELSEWHERE = (503,)


class Broken(Exception):
    """The router's connection broke off: ask the other one."""


def requests():
    """Of all kinds; what they give depends on nothing else."""
    for number, prompt in enumerate(PROMPTS):
        yield {"prompt": prompt, "max_tokens": 40, "temperature": 0, "stream": True}
        yield {"prompt": prompt, "max_tokens": 60, "temperature": 0.9, "seed": number, "n": 2}
        yield {"prompt": prompt, "max_tokens": 90, "temperature": 0.7, "seed": 50 + number,
               "logprobs": 1, "stream": True}


class Turns:
    """The cluster, its load, and what went wrong."""

    def __init__(self, options, seed):
        self.cluster = Cluster(options.bin, routers=2, prefill=2, decode=3, kvstore=2, threads=1,
                               kv_memory="256M", kvstore_args=["--capacity", "64M", "--replicas", "2"],
                               router_args=["--queue-ms", "60000", "--drain-ms",
                                            "200000" if "san-" in options.bin else "20000"])
        self.random = random.Random(seed)
        self.requests = list(requests())
        self.expected = []
        self.answered = 0
        self.done = threading.Event()

    def ask(self, router, which, salt):
        """Tokens and reasons of each choice, and the tokens that were counted."""
        c = self.cluster
        request = self.requests[which]
        body = {"model": c.model, "ignore_eos": True, "cache_salt": salt, **request}
        if request.get("stream"):
            body["stream_options"] = {"include_usage": True}
        try:
            answer = c.request("POST", "/v1/completions", body, request.get("stream", False),
                               to=router, check=True)
        except (ConnectionError, http.client.HTTPException) as error:
            raise Broken() from error
        except HTTPError as error:
            assert error.status in TRY_ELSEWHERE and error.response.json["error"]["message"], error
            raise Broken() from error
        if not request.get("stream"):
            return ([(choice["text"], choice["finish_reason"]) for choice in answer.choices],
                    answer.usage["completion_tokens"])
        return self.read(answer)

    @staticmethod
    def read(stream):
        text, finish, usage = "", None, None
        try:
            for event in stream:
                assert "error" not in event, event
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    text += choice_text(choice)
                    finish = choice["finish_reason"] or finish
        except (ConnectionError, http.client.HTTPException) as error:
            raise Broken() from error
        if not stream.done:
            raise Broken()
        return [(text, finish)], usage["completion_tokens"]

    def client(self, number):
        draw = random.Random(number)
        while not self.done.is_set():
            which = draw.randrange(len(self.requests))
            salt = f"load{draw.randrange(4)}"
            for turn in range(2000):  # a router comes back after some
                try:
                    got = self.ask(ROUTERS[(number + turn) % 2], which, salt)
                    break
                except Broken:
                    continue
            else:
                raise AssertionError("no router answers")
            assert got == self.expected[which], (which, got, self.expected[which])
            self.answered += 1

    def knows_all(self, router):
        try:
            return self.cluster.live(router) == 7
        except OSError:
            return False

    def fall(self, process_id, action):
        c = self.cluster
        if action == "freeze":
            c.kill(process_id, signal.SIGSTOP)
            self.done.wait(FROZEN_S)  # a frozen process is not waited for: this is its length
            c.kill(process_id, signal.SIGCONT)
        else:
            c.restart(process_id, signal.SIGKILL if action == "kill" else signal.SIGTERM)
        for router in ROUTERS:
            wait_until(lambda: self.knows_all(router), 60, f"{router} knows all after {process_id}")
        before = self.answered
        wait_until(lambda: self.answered >= before + CLIENTS or self.done.is_set(), 120,
                   f"answers go on after {action} of {process_id}")

    def falls(self, turns):
        try:
            for process_id, action in turns:
                self.fall(process_id, action)
                print(f"    {action} {process_id}: {self.answered} answers", flush=True)
        finally:
            self.done.set()

    def run(self, turns):
        c = self.cluster
        self.expected = [self.ask(ROUTERS[i % 2], i, "clean") for i in range(len(self.requests))]
        run_together([(self.client, number) for number in range(CLIENTS)] + [(self.falls, turns)],
                     lambda do, *args: do(*args))
        c.wait_at_rest(seconds=30)
        for router in ROUTERS:
            series = c.metrics(router)
            assert series["tandem_router_requests_running"] == 0
            failed = {name: value for name, value in series.items() if value > 0 and
                      name.startswith("tandem_router_requests_total") and
                      not name.endswith(('outcome="ok"}', 'outcome="client_gone"}'))}
            # Of a router that drains, or that has just come back and knows no node yet.
            assert all("upstream_error" in name or "shutdown" in name for name in failed), failed
        for role in ("prefill", "decode", "kvstore"):
            for process_id in c.ids(role):
                series = c.metrics(process_id)
                assert series[f"tandem_{role}_checksum_failures_total"] == 0, process_id


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
