"""Several routers at once over the same nodes, which find them in etcd: each serves, one that dies or
freezes takes nobody along, routers come and go, and each knows what the others have nodes do."""
import base64
import os
import signal
import subprocess
import sys
import threading

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import MODEL, Cluster, HTTPError, main, run_together, test, wait_until

PROMPT = "The ferrymen of the two rivers kept a book of every crossing in fog. " * 6
ROUTERS = ("router", "router-2")


class Routers(Cluster):
    """Two of them; requests go to either."""

    def __init__(self, options, **more):
        super().__init__(options.bin, **{"routers": 2, "prefill": 1, "decode": 2, "kvstore": 1,
                                         "kv_memory": "256M",
                                         "router_args": ["--allow-placement", "--queue-ms", "30000"],
                                         **more})

    def ask(self, router, salt, stream=False, **parameters):
        """A completion through that router; with stream, the Stream."""
        body = {"model": self.model, "prompt": PROMPT, "max_tokens": 40, "temperature": 0.8,
                "seed": 7, "ignore_eos": True, "cache_salt": salt, "stream": stream, **parameters}
        return self.request("POST", "/v1/completions", body, stream, to=router, check=True)


    def put(self, key, value):
        self.etcd("/v3/kv/put", {"key": base64.b64encode(key.encode()).decode(),
                                 "value": base64.b64encode(value.encode()).decode()})


def texts(stream):
    """All text of a stream, or an error where it breaks off."""
    text = ""
    for event in stream:
        assert "error" not in event, event
        text += "".join(choice["text"] for choice in event["choices"])
    assert stream.done, "no [DONE]"
    return text


@test
def test_i1_each_router_gives_the_same_answers(options):
    with Routers(options) as c:
        assert c.in_etcd() == sorted(ROUTERS)
        answers = [c.ask(router, "same") for router in ROUTERS for _ in range(2)]
        assert len({answer.text for answer in answers}) == 1
        # What the one has had computed the other finds.
        assert all(answer.usage["prompt_tokens_details"]["cached_tokens"] > 0
                   for answer in answers[1:])
        streamed = [texts(c.ask(router, "same", stream=True)) for router in ROUTERS]
        assert set(streamed) == {answers[0].text}
        for router in ROUTERS:
            assert c.metrics(router)['tandem_router_requests_total{outcome="ok"}'] == 3
        c.wait_at_rest()


@test
def test_i5_a_router_that_dies_takes_nobody_along(options):
    """Its tickets end at the nodes with their lease; the other router's go on. It comes back in place."""
    with Routers(options) as c:
        long = {"max_tokens": 1500, "temperature": 0, "speculation": {"drafter": "none"}}
        expected = c.ask("router-2", "clean", **long).text
        lost = [c.ask("router", f"lost{i}", stream=True, max_tokens=4000) for i in range(3)]
        kept = c.ask("router-2", "kept", stream=True, **long)
        for stream in lost + [kept]:
            next(iter(stream))
        command = c.end("router")
        got = {}
        reader = threading.Thread(target=lambda: got.update(text=texts(kept)))
        reader.start()
        assert c.ask("router-2", "short").usage["completion_tokens"] == 40
        reader.join()
        assert got["text"] and expected.endswith(got["text"])
        for stream in lost:
            stream.close()
        c.wait_at_rest()  # nothing of the dead router's is held: its lease is over
        assert c.live("router-2") == 4
        for node in ("decode-1", "decode-2"):
            assert "peer down" not in c.log(node)
        wait_until(lambda: c.in_etcd() == ["router-2"], 10, "etcd has forgotten it")
        c.start("router", command)
        wait_until(lambda: c.live("router") == 4, 20, "all nodes have joined it again")
        assert c.ask("router", "back").text == c.ask("router-2", "again").text
        wait_until(lambda: c.in_etcd() == sorted(ROUTERS), 10, "it is in etcd again")
        c.wait_at_rest()


@test
def test_i5_nothing_is_held_for_a_router_that_came_back_at_once(options):
    """Sooner than its lease ends: its new life knows nothing of the old one's tickets to cancel them."""
    with Routers(options) as c:
        expected = c.ask("router-2", "clean", max_tokens=1500).text
        lost = [c.ask("router", f"lost{i}", stream=True, max_tokens=4000) for i in range(3)]
        kept = c.ask("router-2", "kept", stream=True, max_tokens=1500)
        for stream in lost:
            next(iter(stream))
        c.restart("router")
        assert texts(kept) == expected  # the other one's go on
        for stream in lost:
            stream.close()
        c.wait_at_rest(seconds=10)
        wait_until(lambda: c.live("router") == 4, 20, "all nodes have joined it again")
        for node in ("decode-1", "decode-2"):
            assert "router silent for a ticket lease" not in c.log(node), node
        assert c.ask("router", "back").text == c.ask("router-2", "again").text
        c.wait_at_rest()


@test
def test_i9_a_router_that_slept_goes_on(options):
    """Longer than tickets live: the nodes have let its work go, and do it again, for the same stream."""
    with Routers(options) as c:
        long = {"max_tokens": 700, "temperature": 0.7, "seed": 3}
        expected = c.ask("router", "clean", **long).text
        stream = c.ask("router", "slept", stream=True, **long)
        text = next(iter(stream))["choices"][0]["text"]
        c.kill("router", signal.SIGSTOP)
        try:
            wait_until(lambda: any("router silent" in c.log(node)
                                   for node in ("decode-1", "decode-2")), 20,
                       "its tickets are void")
            assert c.ask("router-2", "meanwhile").usage["completion_tokens"] == 40
            c.wait_at_rest()
        finally:
            c.kill("router", signal.SIGCONT)
        text += texts(stream)
        assert text == expected
        wait_until(lambda: c.live("router") == 4, 20, "all nodes have joined it again")
        c.wait_at_rest()


@test
def test_routers_come_and_go(options):
    with Routers(options, routers=2, decode=1, kvstore=0) as c:
        etcd = f"http://{c.processes['etcd']['http']}"
        ready = os.path.join(c.run_dir, "router-3.ready")
        log_path = os.path.join(c.run_dir, "router-3.log")
        # What is no router's own is not taken for one, and keeps nobody from the others.
        c.put("/tandem/tandem/routers/garbage", "no endpoint at all")
        c.put("/tandem/tandem/routers/", "tcp://127.0.0.1:1")
        c.put("/tandem/tandem/routers/other%20name", "tcp://127.0.0.1:1")
        with open(log_path, "wb") as log:
            third = subprocess.Popen(
                [os.path.join(c.bin, "tandem-router"), "--id", "router-3", "--listen",
                 "tcp://127.0.0.1:*", "--http", "127.0.0.1:0", "--model", MODEL,
                 "--cluster-secret-file", os.path.join(c.run_dir, "cluster.secret"),
                 "--etcd", etcd, "--ready-file", ready, "--drain-ms", "20000"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=c.env)
        try:
            wait_until(lambda: os.path.exists(ready) and os.path.getsize(ready) > 0, c.timeout_s,
                       "the third router is up")
            with open(ready, encoding="utf-8") as file:
                c.processes["router-3"] = {"id": "router-3", "role": "router", "pid": third.pid,
                                           "http": file.read().split()[0], "log": log_path}
            wait_until(lambda: c.live("router-3") == 2, 20, "all nodes have joined it")
            assert c.ask("router-3", "same").text == c.ask("router", "same").text
            stream = c.ask("router-3", "same", stream=True, max_tokens=200)
            next(iter(stream))
            third.terminate()
            wait_until(lambda: "router-3" not in c.in_etcd(), 10, "it has left etcd")
            texts(stream)  # what it had it finishes
            assert third.wait(20) == 0
            wait_until(lambda: all('msg="router left" router=router-3' in c.log(node)
                                   for node in ("prefill-1", "decode-1")), 20, "nodes have left it")
        finally:
            if third.poll() is None:
                third.kill()
                third.wait()
            c.processes.pop("router-3", None)
        assert c.ask("router-2", "same").usage["completion_tokens"] == 40
        c.wait_at_rest()


@test
def test_a_router_knows_what_others_have_nodes_do(options):
    """Requests of the one occupy a decode node; the other places its own on the free one."""
    with Routers(options) as c:
        busy = [c.ask("router", f"busy{i}", stream=True, max_tokens=4000,
                      tandem={"decode": "decode-1"}) for i in range(3)]
        for stream in busy:
            next(iter(stream))

        def placed():
            return {c.ask("router-2", f"probe{i}", max_tokens=2).headers["x-tandem-decode"]
                    for i in range(4)}

        wait_until(lambda: placed() == {"decode-2"}, 20, "the free node gets all")
        for stream in busy:
            stream.close()
        c.wait_at_rest()


@test
def test_i9_routers_restarted_in_turn_under_load_fail_nothing(options):
    """A client that is refused, or whose connection is, asks the other router; no answer changes."""
    with Routers(options, router_args=["--queue-ms", "30000", "--drain-ms", "20000"]) as c:
        expected = {number: c.ask("router", "clean", seed=number).text for number in range(4)}
        done = threading.Event()
        answered = []

        def ask_either(number):
            for turn in range(200):
                try:
                    return c.ask(ROUTERS[(number + turn) % 2], f"load{len(answered) % 5}",
                                 seed=number).text
                except HTTPError as error:
                    assert error.status == 503, error
                except ConnectionError:
                    pass  # refused, or cut before a byte of an answer came
            raise AssertionError("no router answers")

        def load(number):
            while not done.is_set():
                assert ask_either(number) == expected[number]
                answered.append(number)

        def restart_all():
            try:
                for router in ROUTERS * 2:
                    before = len(answered)
                    c.restart(router, signal.SIGTERM)
                    wait_until(lambda: c.live(router) == 4, 20, "all nodes have joined it again")
                    wait_until(lambda: len(answered) >= before + 6, 60, "answers go on")
            finally:
                done.set()

        run_together([(load, number) for number in expected] + [(restart_all,)],
                     lambda do, *args: do(*args))
        c.wait_at_rest()


@test
def test_f9_nodes_keep_their_routers_while_etcd_is_away(options):
    with Routers(options, kvstore=0) as c:
        command = c.end("etcd")
        assert c.ask("router", "same").text == c.ask("router-2", "same").text
        c.restart("decode-1", signal.SIGKILL)  # it will ask for routers again and again
        assert c.ask("router", "same").usage["completion_tokens"] == 40
        c.start("etcd", command)
        for router in ROUTERS:
            wait_until(lambda: c.live(router) == 3, 30, "all nodes have joined")
        c.wait_at_rest()


if __name__ == "__main__":
    main(__doc__)
