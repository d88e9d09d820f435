"""Many nodes that compute nothing at a real router: all requests are answered, nothing is left at rest,
and what ran on nodes that die goes on elsewhere with the same tokens."""
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import Cluster, ROOT, main, run_together, test, wait_until

MODEL = os.path.join(ROOT, "build", "models", "SmolLM2-135M-Instruct.Q4_1.gguf")
NODES = ('tandem_router_nodes{role="prefill"}', 'tandem_router_nodes{role="decode"}')


class Mocks:
    """A process that plays nodes of a cluster."""

    def __init__(self, cluster, name, prefill, decode, *more):
        bench = os.path.join(cluster.bin, "tandem-bench")
        self.log = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [bench, "mock", "--router", cluster.router_endpoint, "--model", MODEL, "--secret",
             os.path.join(cluster.run_dir, "cluster.secret"), "--name", name, "--prefill", str(prefill),
             "--decode", str(decode), *map(str, more), "--json"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self.log, text=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.log.close()

    def stop(self, seconds=60):
        """Ends it as an operator would; what it counted."""
        self.process.send_signal(signal.SIGTERM)
        out, _ = self.process.communicate(timeout=seconds)
        assert self.process.returncode == 0, self.process.returncode
        return json.loads(out)


@contextlib.contextmanager
def router_alone(options):
    """A cluster without nodes; local.sh waits for those that it starts, which are none."""
    with Cluster(options.bin, prefill=0, decode=0, kvstore=0,
                 router_args=["--allow-placement"]) as c:
        yield c


def wait_for_nodes(c, prefill, decode):
    wait_until(lambda: tuple(c.metrics()[name] for name in NODES) == (prefill, decode), 60,
               f"{prefill} prefill and {decode} decode nodes")


def ask(c, number, **more):
    """Text and token ids of an answer."""
    reply = c.complete(f"Number {number} of many.", max_tokens=16, seed=number, **more)
    assert reply.usage["completion_tokens"] == 16, reply.json
    assert reply.choices[0]["finish_reason"] == "length", reply.json
    return reply.text, reply.json["tandem"]["tokens"]


@test
def test_forty_nodes_answer_all_and_keep_nothing(options):
    with router_alone(options) as c, Mocks(c, "many", 20, 20) as mocks:
        wait_for_nodes(c, 20, 20)
        lock = threading.Lock()
        left = list(range(200))
        served = set()

        def work():
            while True:
                with lock:
                    if not left:
                        return
                    number = left.pop()
                reply = c.complete(f"Number {number} of many.", max_tokens=16, stream=number % 2 == 1,
                                   seed=number)
                headers = reply.headers
                if number % 2 == 1:
                    stream = reply.collect()
                    assert stream.done and stream.error is None and stream.finish == {0: "length"}
                    assert len(stream.text) > 16
                else:
                    assert reply.usage["completion_tokens"] == 16, reply.json
                with lock:
                    served.update((headers["x-tandem-prefill"], headers["x-tandem-decode"]))

        run_together([()] * 8, work)
        series = c.metrics()
        assert series['tandem_router_requests_total{outcome="ok"}'] == 200
        assert series["tandem_router_place_seconds_count"] == 200
        assert series["tandem_router_requests_running"] == 0
        assert series["tandem_router_retries_total"] == 0
        assert series["tandem_router_bus_refused"] == 0
        assert len(served) > 20, served  # load is spread
        counts = mocks.stop()
        assert counts["reserves"] == counts["ended"] == 200, counts
        assert counts["starts"] + counts["selves"] == 200, counts
        assert counts["tokens"] == 200 * 16, counts
        for what in ("under_way", "busy", "cancelled", "expired", "unsent", "stray", "lives"):
            assert counts[what] == 0, counts


@test
def test_mock_nodes_drain(options):
    """The first signal: nothing new, and what is under way is finished."""
    with router_alone(options) as c, Mocks(c, "slow", 1, 1, "--ttft-us", 20000, "--tbt-us",
                                           40000) as mocks:
        wait_for_nodes(c, 1, 1)
        with c.complete("A drained answer.", max_tokens=16, stream=True) as stream:
            events = iter(stream)
            next(events)
            stopped = []
            stopping = threading.Thread(target=lambda: stopped.append(mocks.stop()))
            stopping.start()
            rest = list(events)
            stopping.join()
        assert stream.done and rest[-1]["choices"][0]["finish_reason"] == "length", rest
        assert stopped[0]["ended"] == 1 and stopped[0]["under_way"] == 0, stopped


@test
def test_i9_dead_mock_nodes_are_followed_by_others(options):
    with router_alone(options) as c, Mocks(c, "stays", 2, 2) as stays:
        wait_for_nodes(c, 2, 2)
        clean = {number: ask(c, number) for number in range(12)}
        with Mocks(c, "falls", 2, 2, "--tbt-us", 100000) as falls:
            wait_for_nodes(c, 4, 4)
            broken = {}

            def run(number):
                broken[number] = ask(c, number, tandem={"prefill": f"falls-p{number % 2 + 1}",
                                                        "decode": f"falls-d{number % 2 + 1}"})

            def fall():
                wait_until(lambda: c.metrics()["tandem_router_requests_running"] == len(clean), 30,
                           "all are under way")
                falls.process.kill()

            run_together([(run, number) for number in clean] + [(fall,)], lambda do, *args: do(*args))
        assert broken == clean
        series = c.metrics()
        assert series["tandem_router_node_deaths_total"] == 4
        assert series["tandem_router_retries_total"] == len(clean)
        assert series["tandem_router_requests_running"] == 0
        counts = stays.stop()
        assert counts["under_way"] == 0 and counts["ended"] == 2 * len(clean), counts


if __name__ == "__main__":
    main(__doc__)
