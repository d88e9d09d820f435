"""What a client receives across a decode node's death is, token for token, what it would have received
without it (I9): streams and whole answers, several choices, log-probabilities, stop strings, text that
is held back, with and without drafts, one request or many; usage is counted once."""
import os
import signal
import sys
import threading

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import Cluster, choice_text, main, run_together, test, wait_until

STORY = "Write a long story about a clockmaker, a river and a city of bridges. " * 4


def cluster(options, **more):
    return Cluster(options.bin, **{"prefill": 1, "decode": 2, "kvstore": 1, "kv_memory": "256M",
                                   "router_args": ["--allow-placement"], **more})


def follow(stream, on_event=None):
    """All of a stream that must not depend on what happened meanwhile, choice by choice."""
    choices, usage, errors = {}, None, []
    for count, event in enumerate(stream, 1):
        usage = event.get("usage") or usage
        errors += [event["error"]] if "error" in event else []
        for choice in event.get("choices", []):
            got = choices.setdefault(choice["index"], {"text": "", "finish": [], "tokens": [],
                                                       "hashes": [], "logprobs": []})
            logprobs = choice.get("logprobs") or {}
            got["text"] += choice_text(choice)
            got["finish"] += [choice["finish_reason"]] if choice.get("finish_reason") else []
            got["tokens"] += event["tandem"]["tokens"]
            got["hashes"] += event["tandem"]["logits_xxh"]
            got["logprobs"] += list(zip(*(logprobs[key] for key in sorted(logprobs)
                                          if isinstance(logprobs[key], list))))
        if on_event is not None:
            on_event(count)
    assert not errors, errors
    assert stream.done, "no [DONE]"
    usage = dict(usage)
    usage.pop("completion_tokens_details")
    return choices, usage


def ask(c, decode, salt, on_event=None, **request):
    body = {"max_tokens": 60, "ignore_eos": True, "stream": True, "logprobs": 2, "cache_salt": salt,
            "stream_options": {"include_usage": True}, "tandem": {"decode": decode}, **request}
    return follow(c.complete(body.pop("prompt", STORY), **body), on_event)


def same_across_death(c, request, serial, falls, at=7):
    """The same request twice: with both nodes healthy, and with one that falls at an event."""
    def fall(count):
        if count == at:
            falls("decode-2")
    clean = ask(c, "decode-1", f"clean{serial}", **request)
    broken = ask(c, "decode-2", f"broken{serial}", fall, **request)
    assert broken == clean, (request, broken, clean)


def continued(c, node="decode-1"):
    return c.metrics(node)["tandem_decode_continued_total"]


def characters(c, text):
    """Sampling that says the tokens of a text in no order: characters come in pieces, and torn."""
    body = {"model": c.model, "prompt": text, "add_special_tokens": False}
    tokens = c.request("POST", "/tokenize", body, check=True).json["tokens"]
    return {"temperature": 2, "seed": 11, "logit_bias": {str(token): 100 for token in tokens}}


@test
def test_i9_a_stream_across_a_death_is_the_clean_runs(options):
    with cluster(options) as c:
        requests = [{"temperature": 0, "speculation": {"drafter": "none"}},
                    {"temperature": 0.9, "seed": 5, "n": 3},
                    {"temperature": 0.8, "seed": 3, "n": 4, "stop": [" the", " was"],
                     "include_stop_str_in_output": True, "min_tokens": 6},
                    {"temperature": 0.7, "seed": 9, "repetition_penalty": 1.2,
                     "frequency_penalty": 0.5, "speculation": {"drafter": "early_exit", "k": 3}},
                    {**characters(c, " 日本語 😀 naïve Ωμέγα"), "max_tokens": 90, "n": 2},
                    {"prompt": "Hi", "temperature": 0, "echo": True, "max_tokens": 30}]
        for serial, request in enumerate(requests):
            before = continued(c)
            commands = []
            same_across_death(c, request, serial, lambda node: commands.append(c.end(node)))
            assert continued(c) == before + 1, request
            c.start("decode-2", commands[0])
            wait_until(lambda: c.live() == 4, 20,
                       "decode-2 is back")
        assert c.metrics()["tandem_router_failovers_total"] == len(requests)
        assert c.metrics("decode-1")['tandem_decode_returned_tokens_total{source="cache"}'] > 0
        c.wait_at_rest(["decode-1", "decode-2", "prefill-1"])


@test
def test_i9_a_stream_waits_for_the_only_node_to_come_back(options):
    """What was generated before the death is fetched from the store, as far as it filled blocks."""
    with cluster(options, decode=1) as c:
        request = {"temperature": 0, "max_tokens": 120, "speculation": {"drafter": "none"}}
        clean = ask(c, "decode-1", "clean", **request)
        back = []

        def restart(count):
            if count == 50:
                command = c.end("decode-1")
                back.append(threading.Thread(target=c.start, args=("decode-1", command)))
                back[0].start()

        broken = ask(c, "decode-1", "broken", restart, **request)
        back[0].join()
        assert broken == clean
        assert continued(c) == 1
        assert c.metrics("decode-1")['tandem_decode_returned_tokens_total{source="store"}'] > 0
        c.wait_at_rest(["decode-1", "prefill-1"])


@test
def test_i9_a_stream_across_a_frozen_node_is_the_clean_runs(options):
    with cluster(options, kvstore=0) as c:
        same_across_death(c, {"temperature": 0.6, "seed": 2}, 0,
                          lambda node: c.kill(node, signal.SIGSTOP))
        assert continued(c) == 1
        c.wait_at_rest(["decode-1", "prefill-1"])
        c.kill("decode-2", signal.SIGKILL)


@test
def test_i9_a_successor_falls_as_well(options):
    """Two nodes in a row, the second while it takes over."""
    with cluster(options, decode=3, kvstore=0,
                 args_of={"decode-2": ["--fault", "decode_token:kill:20"],
                          "decode-1": ["--fault", "decode_continue:kill"]}) as c:
        clean = ask(c, "decode-3", "clean", temperature=0.9, seed=4, n=2)
        broken = ask(c, "decode-2", "broken", temperature=0.9, seed=4, n=2)
        assert broken == clean
        assert not c.alive("decode-2") and continued(c, "decode-3") == 1
        c.wait_at_rest(["decode-3", "prefill-1"])


@test
def test_i9_many_answers_across_a_death_are_the_clean_runs(options):
    """Streams and whole answers, more than a node runs at once, on a pool that makes some give way."""
    with cluster(options, kv_memory="40M", router_args=["--allow-placement", "--queue-ms", "60000"],
                 ) as c:
        def whole(number, salt):
            reply = c.complete(f"{number} bridges. {STORY[:70]}", n=2, temperature=0.9, seed=number,
                               max_tokens=50, ignore_eos=True, logprobs=1, cache_salt=salt)
            usage = dict(reply.usage)
            usage.pop("completion_tokens_details")
            usage.pop("prompt_tokens_details")
            return ([(choice["text"], choice["finish_reason"], choice["logprobs"])
                     for choice in reply.choices], reply.json["tandem"]["logits_xxh"], usage)

        def streamed(number, salt):
            request = {"prompt": f"{number} bridges. {STORY[:70]}", "temperature": 0.9,
                       "seed": number, "max_tokens": 50, "tandem": {}}
            choices, usage = ask(c, "", salt, **request)
            usage.pop("prompt_tokens_details")
            return choices, usage

        jobs = [(kind, number) for number in range(10) for kind in (whole, streamed)]
        expected = {job: job[0](job[1], "clean") for job in jobs}
        started = threading.Barrier(len(jobs) + 1)
        got = {}

        def run(kind, number):
            started.wait()
            got[(kind, number)] = kind(number, "broken")

        def fall():
            started.wait()
            victim = c.metrics("decode-2")
            wait_until(lambda: c.metrics("decode-2")["tandem_decode_tokens_total"]
                       > victim["tandem_decode_tokens_total"] + 100, 30, "decode-2 generates")
            c.kill("decode-2")

        run_together([(run, *job) for job in jobs] + [(fall,)], lambda do, *args: do(*args))
        for job in jobs:
            assert got[job] == expected[job], (job, got[job], expected[job])
        assert continued(c) > 0
        c.wait_at_rest(["decode-1", "prefill-1"])


if __name__ == "__main__":
    main(__doc__)
