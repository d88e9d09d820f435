"""SIGTERM drains a node: it takes nothing new, finishes what it has, and leaves; nodes restarted one after
the other under load fail no request and change no token."""
import os
import signal
import sys
import threading

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import Cluster, main, run_together, test, wait_until

PROMPT = "The lighthouse keeper wrote a letter about the storm of that winter. " * 6


def gone(c, process_id):
    wait_until(lambda: not c.alive(process_id), 20, f"{process_id} has left")


def state_of(c, process_id):
    return c.nodes()[process_id]["state"]


@test
def test_a_draining_node_finishes_what_it_has(options):
    with Cluster(options.bin, prefill=1, decode=2, kvstore=0,
                 router_args=["--allow-placement"]) as c:
        ask_for = {"max_tokens": 150, "temperature": 0, "ignore_eos": True, "cache_salt": "long",
                   "speculation": {"drafter": "none"}}
        expected = c.complete(PROMPT, tandem={"decode": "decode-1"}, **ask_for).text
        stream = c.complete(PROMPT, stream=True, tandem={"decode": "decode-2"}, **ask_for)
        events = iter(stream)
        text = next(events)["choices"][0]["text"]
        c.kill("decode-2", signal.SIGTERM)
        wait_until(lambda: state_of(c, "decode-2") == "draining", 10, "decode-2 drains")
        # A new request goes to the other node, although that has more to do.
        others = [c.complete(f"{i}", stream=True, max_tokens=4000, ignore_eos=True,
                             tandem={"decode": "decode-1"}) for i in range(2)]
        for other in others:
            next(iter(other))
        assert c.complete("Hi", max_tokens=2).headers["x-tandem-decode"] == "decode-1"
        for other in others:
            other.close()
        for event in events:
            text += event["choices"][0]["text"]
        assert stream.done and text == expected
        assert c.metrics()["tandem_router_failovers_total"] == 0
        gone(c, "decode-2")
        assert 'why=drained' in c.log("decode-2")


@test
def test_a_second_signal_ends_a_node_at_once(options):
    with Cluster(options.bin, prefill=1, decode=2, kvstore=0,
                 router_args=["--allow-placement"]) as c:
        stream = c.complete(PROMPT, stream=True, max_tokens=4000, temperature=0, ignore_eos=True,
                            tandem={"decode": "decode-2"})
        next(iter(stream))
        c.kill("decode-2", signal.SIGTERM)
        wait_until(lambda: 'msg="draining"' in c.log("decode-2"), 10, "decode-2 drains")
        c.kill("decode-2", signal.SIGTERM)
        gone(c, "decode-2")
        stream.close()


@test
def test_i9_nodes_restarted_in_turn_under_load_fail_nothing(options):
    with Cluster(options.bin, prefill=2, decode=2, kvstore=2,
                 router_args=["--queue-ms", "30000"]) as c:
        def ask(number, salt):
            reply = c.complete(f"{number}. {PROMPT}", max_tokens=30, temperature=0.8, seed=number,
                               ignore_eos=True, cache_salt=salt)
            return reply.text, reply.usage["completion_tokens"]

        expected = {number: ask(number, "clean") for number in range(6)}
        done = threading.Event()
        answered = []

        def load(number):
            while not done.is_set():
                assert ask(number, f"load{len(answered) % 5}") == expected[number]
                answered.append(number)

        def restart_all():
            try:
                for process_id in c.ids("prefill") + c.ids("decode") + c.ids("kvstore"):
                    before = len(answered)
                    c.restart(process_id, signal.SIGTERM)
                    wait_until(lambda: state_of(c, process_id) == "live", 20, "it is back")
                    wait_until(lambda: len(answered) >= before + 6, 60, "answers go on")
            finally:
                done.set()

        run_together([(load, number) for number in expected] + [(restart_all,)],
                     lambda do, *args: do(*args))
        outcomes = {name: value for name, value in c.metrics().items()
                    if name.startswith("tandem_router_requests_total") and value > 0}
        assert list(outcomes) == ['tandem_router_requests_total{outcome="ok"}'], outcomes


if __name__ == "__main__":
    main(__doc__)
