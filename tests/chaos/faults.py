"""Kill or freeze one process at a named step of a hand-off or of a put, and look at everybody else.

A cluster of healthy processes stands; for each cell one more process joins it with --fault STEP:ACTION,
is given requests, and falls. What must hold afterwards is in check_cell()."""
import os
import signal
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import ROOT, Cluster, HTTPError, wait_until

MODEL = os.path.join(ROOT, "build/models/SmolLM2-135M-Instruct.Q4_1.gguf")
PROMPT = "The history of the printing press begins in the city of Mainz, where " * 6

PREFILL_STEPS = ("prefill_start", "prefill_lookup", "prefill_layers", "prefill_chunk",
                 "prefill_before_ready", "prefill_ready", "store_put_start")
DECODE_STEPS = ("decode_reserve", "decode_fetch", "transfer_piece", "verify_block",
                "decode_verify", "decode_before_ack", "decode_ack", "decode_token:6", "decode_step:6")
STORE_STEPS = ("store_lookup", "segment_fetching", "transfer_piece", "verify_block",
               "segment_fetched", "store_put_end")
ACTIONS = ("kill", "stop")
CARRIERS = {"shm": {}, "tcp": {"UCX_TLS": "tcp"}}


def cells(role, carrier):
    steps = {"prefill": PREFILL_STEPS, "decode": DECODE_STEPS, "kvstore": STORE_STEPS}[role]
    if role == "prefill" and carrier == "tcp":
        steps = steps + ("transfer_answer",)
    for step in steps:
        for action in ACTIONS:
            name, _, nth = step.partition(":")
            yield name, action, int(nth or 1)


class Victim:
    """One more process of a role in a running cluster, that falls at a step."""

    def __init__(self, cluster, role, step, action, nth, serial):
        self.cluster = cluster
        self.role = role
        self.id = f"{role}-x{serial}"
        self.ready = os.path.join(cluster.run_dir, f"{self.id}.ready")
        self.log_path = os.path.join(cluster.run_dir, f"{self.id}.log")
        command = [*cluster.joining(f"tandem-{role}", self.id), "--ready-file", self.ready,
                   "--fault", f"{step}:{action}:{nth}"]
        if role == "kvstore":
            command += ["--capacity", "64M"]
        else:
            command += ["--model", MODEL, "--kv-memory", "256M"]
        if role == "prefill":
            command += ["--chunk-tokens", "32"]
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log,
                                            stderr=log, env=cluster.env)

    def joined(self):
        """Alive to the router: a request may be placed on it."""
        return self.cluster.nodes().get(self.id, {}).get("state") == "live"

    def fallen(self):
        if self.process.poll() is not None:
            return True
        with open(f"/proc/{self.process.pid}/stat", encoding="utf-8") as file:
            return file.read().rsplit(")", 1)[1].split()[0] in "TZX"

    def log(self):
        with open(self.log_path, encoding="utf-8", errors="replace") as file:
            return file.read()

    def remove(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        wait_until(lambda: not self.joined(), 10, f"{self.id} forgotten by the router")


def open_cluster(options, carrier, with_store):
    return Cluster(options.bin, prefill=1, decode=1, kvstore=1 if with_store else 0,
                   router_args=["--allow-placement"], kv_memory="256M",
                   prefill_args=["--chunk-tokens", "32"], env=CARRIERS[carrier])


def check_survivors(c):
    for process_id in c.processes:
        assert c.alive(process_id), f"{process_id} did not survive"
    c.wait_at_rest(seconds=20)


def ask(c, salt, tokens=12, stream=False, **place):
    return c.complete(PROMPT, stream=stream, max_tokens=tokens, temperature=0, ignore_eos=True,
                      cache_salt=salt, **({"tandem": place} if place else {}))


def run_cell(c, role, carrier, step, action, nth, serial, expected):
    """One cell. Every salt is new, so that nothing is cached and every step happens."""
    salt = f"{role}{step}{action}{serial}"
    victim = Victim(c, role, step, action, nth, serial)
    try:
        wait_until(victim.joined, 30, f"{victim.id} joined")
        started = time.monotonic()
        if role == "kvstore":
            # The store's fall never fails a request: neither this one nor the next.
            for _ in range(4):
                assert ask(c, salt).text == expected
                if victim.fallen():
                    break
            # Steps of a put come a moment after the answer; a lookup needs a prompt that is not
            # cached, after the nodes have heard of the store.
            deadline = time.monotonic() + 5
            while not victim.fallen() and time.monotonic() < deadline:
                assert ask(c, f"{salt}{time.monotonic_ns()}").text == expected
        else:
            reply = ask(c, salt, **{role: victim.id})
            took = time.monotonic() - started
            assert reply.text == expected, "a retry gives the very same text (I1)"
            assert took < 10, f"{took:.1f} s"
        wait_until(victim.fallen, 10, f"{step}:{action} happened; log: {victim.log()[-2000:]}")
        assert ask(c, salt + "after").text == expected
        check_survivors(c)
    finally:
        victim.remove()
    check_survivors(c)


def run_stream_cell(c, action, serial):
    """A decode node falls in the middle of a stream: another goes on with it (I9)."""
    victim = Victim(c, "decode", "decode_token", action, 6, serial)
    try:
        wait_until(victim.joined, 30, f"{victim.id} joined")
        started = time.monotonic()
        stream = ask(c, f"stream{action}{serial}", tokens=200, stream=True, decode=victim.id)
        got = stream.collect()
        assert got.done and got.error is None, got.events[-1:]
        assert got.text == ask(c, f"stream{action}{serial}after", tokens=200).text
        assert time.monotonic() - started < 10
        check_survivors(c)
    finally:
        victim.remove()


def run_lonely_cell(options, role, carrier, action):
    """The only node of a role falls: an OpenAI-shaped 502 or 503 within 10 s."""
    step = "prefill_start" if role == "prefill" else "decode_fetch"
    with Cluster(options.bin, kv_memory="256M", env=CARRIERS[carrier], kvstore=0,
                 args_of={f"{role}-1": ["--fault", f"{step}:{action}"]}) as c:
        started = time.monotonic()
        reply = c.complete(PROMPT, max_tokens=8, check=False)
        took = time.monotonic() - started
        assert reply.status in (502, 503), (reply.status, reply.body)
        assert reply.json["error"]["message"] and "type" in reply.json["error"]
        assert took < 10, f"{took:.1f} s"
        other = "decode-1" if role == "prefill" else "prefill-1"
        assert c.alive(other)
        c.wait_at_rest([other], 20)
        if c.alive(f"{role}-1"):  # frozen: nothing else ends it at once
            c.kill(f"{role}-1", signal.SIGKILL)


def check_matrix(options, role, carrier):
    """Runs every cell once, prints each, fails at the end with the names of those that failed."""
    bad = []
    for name, error in run_matrix(options, role, carrier):
        print(f"    {name}: {'ok' if error is None else error}", flush=True)
        if error is not None:
            bad.append(name)
    assert not bad, bad


def run_matrix(options, role, carrier, rounds=1):
    """All cells of a role and carrier in one cluster. Yields (name, error or None)."""
    serial = 0
    with open_cluster(options, carrier, with_store=role != "kvstore") as c:
        expected = ask(c, "first").text
        for _ in range(rounds):
            for step, action, nth in cells(role, carrier):
                serial += 1
                error = None
                try:
                    run_cell(c, role, carrier, step, action, nth, serial, expected)
                except (AssertionError, HTTPError, OSError, RuntimeError) as why:
                    error = why
                yield f"{step}_{action}_{carrier}", error
            if role == "decode":
                for action in ACTIONS:
                    serial += 1
                    error = None
                    try:
                        run_stream_cell(c, action, serial)
                    except (AssertionError, HTTPError, OSError, RuntimeError) as why:
                        error = why
                    yield f"stream_{action}_{carrier}", error
