"""A decode node that computes a short rest of a prompt itself gives the very answers that a prefill node's
hand-over gives (I1): whole and streamed, several choices, log-probabilities, drafts, stop strings, from
its cache, from the store and from nothing, across preemption and a death; and the router does it where it
is faster."""
import os
import signal
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import Cluster, main, run_together, test, wait_until

WORDS = ("amber basin candle door engine forest garden harbour island jacket kettle ladder mirror "
         "needle orchard pencil quarry ribbon saddle timber umbrella valley window yard zinc ").split()


def text_of(words, first=0):
    return " ".join(WORDS[(first + i * 7) % len(WORDS)] for i in range(words))


def self_prefills(c, router="router"):
    return c.metrics(router)["tandem_router_self_prefills_total"]


def teach(c):
    """Until prompts are predicted, so that there is something to compare."""
    for i in range(3):
        c.complete(text_of(40 + i, i), max_tokens=4, cache_salt=f"teach{i}",
                   tandem={"prefill": "prefill-1"})


def seen(reply):
    """All of an answer that must not depend on who computed what."""
    usage = dict(reply.usage)
    usage.pop("prompt_tokens_details")
    usage.pop("completion_tokens_details")
    return ([(choice["text"], choice["finish_reason"], choice.get("logprobs"))
             for choice in reply.choices], reply.json["tandem"]["logits_xxh"], usage)


REQUESTS = [
    {"prompt": text_of(9), "temperature": 0},
    {"prompt": text_of(60, 3), "temperature": 0, "logprobs": 4},
    {"prompt": text_of(33, 5), "temperature": 0.9, "seed": 4, "n": 3, "logprobs": 1},
    {"prompt": text_of(70, 8), "temperature": 0.8, "seed": 6, "n": 2, "stop": [" the", " and"],
     "min_tokens": 3},
    {"prompt": text_of(20, 2), "temperature": 0.7, "seed": 8, "repetition_penalty": 1.3,
     "logit_bias": {"28": 5}, "min_tokens": 10, "ignore_eos": False},
    {"prompt": (text_of(12) + " ") * 4, "temperature": 0,
     "speculation": {"drafter": "prompt_lookup", "k": 4}},
    {"prompt": (text_of(12, 1) + " ") * 4, "temperature": 0.6, "seed": 2, "n": 2,
     "speculation": {"drafter": "early_exit", "k": 3}},
    {"prompt": text_of(40, 11), "temperature": 0, "max_tokens": 1},
    {"prompt": text_of(40, 12), "temperature": 0.5, "seed": 1, "echo": True},
]


def exact_tokens(c, count):
    """A prompt of so many tokens, as ids."""
    body = {"model": c.model, "prompt": text_of(200)}
    return c.request("POST", "/tokenize", body, check=True).json["tokens"][:count]


def ask(c, request, salt, **more):
    body = {"max_tokens": 24, "ignore_eos": True, "cache_salt": salt, "tandem": {}, **request, **more}
    return c.complete(body.pop("prompt"), **body)


@test
def test_i1_a_prompt_computed_by_a_decode_node_gives_the_same_answer(options):
    with Cluster(options.bin, self_prefill=4096, kvstore=1, kv_memory="256M",
                 router_args=["--allow-placement"]) as c:
        teach(c)
        requests = REQUESTS + [{"prompt": exact_tokens(c, count), "temperature": 0.9, "seed": count,
                                "n": n} for count in (1, 15, 16, 17, 32, 64, 100) for n in (1, 3)]
        for number, request in enumerate(requests):
            handed = ask(c, request, f"handed{number}", tandem={"prefill": "prefill-1"})
            before = self_prefills(c)
            cold, warm = (ask(c, request, f"self{number}", tandem={"prefill": "decode-1"})
                          for _ in range(2))
            assert self_prefills(c) == before + 2, (number, request)
            assert cold.headers["x-tandem-prefill"] == "decode-1"
            assert seen(cold) == seen(handed), (request, seen(cold), seen(handed))
            assert seen(warm) == seen(handed), (request, seen(warm), seen(handed))
            prompt = handed.usage["prompt_tokens"]
            assert cold.usage["prompt_tokens_details"]["cached_tokens"] == 0
            assert warm.usage["prompt_tokens_details"]["cached_tokens"] == (prompt - 1) // 16 * 16
        series = c.metrics("decode-1")
        assert series["tandem_decode_prompts_total"] == self_prefills(c) == 2 * len(requests)
        assert series['tandem_decode_prompt_tokens_total{source="computed"}'] > 0
        assert series['tandem_decode_prompt_tokens_total{source="cache"}'] > 0
        c.wait_at_rest()


@test
def test_a_turn_of_a_conversation_stays_with_the_node_that_has_it(options):
    """What the answer before was generated from, and it itself, are there: only the turn is computed."""
    with Cluster(options.bin, self_prefill=128, decode=2, kvstore=0,
                 router_args=["--allow-placement"]) as c:
        teach(c)
        first = text_of(150, 4)
        reply = ask(c, {"prompt": first, "temperature": 0}, "talk", max_tokens=60)
        assert reply.headers["x-tandem-prefill"] == "prefill-1"  # too long a rest
        turn = first + reply.text + " " + text_of(20, 6)
        clean = ask(c, {"prompt": turn, "temperature": 0}, "clean", tandem={"prefill": "prefill-1"})
        node = reply.headers["x-tandem-decode"]
        again = ask(c, {"prompt": turn, "temperature": 0}, "talk", tandem={"prefill": node})
        assert again.headers["x-tandem-prefill"] == again.headers["x-tandem-decode"] == node
        assert seen(again) == seen(clean)
        rest = again.usage["prompt_tokens"] - again.usage["prompt_tokens_details"]["cached_tokens"]
        assert rest < 60, rest
        c.wait_at_rest()


@test
def test_i1_the_prefix_comes_from_the_store(options):
    """It was computed elsewhere; the decode node fetches it and computes the rest."""
    with Cluster(options.bin, self_prefill=4096, decode=2, kvstore=1,
                 router_args=["--allow-placement"]) as c:
        teach(c)
        prompt = text_of(120, 9)
        clean = ask(c, {"prompt": prompt, "temperature": 0}, "clean", tandem={"prefill": "prefill-1"})
        before = c.metrics("kvstore-1")['tandem_kvstore_puts_total{result="stored"}']
        ask(c, {"prompt": prompt, "temperature": 0}, "salt",
            tandem={"prefill": "prefill-1", "decode": "decode-1"})
        full = clean.usage["prompt_tokens"] // 16
        wait_until(lambda: c.metrics("kvstore-1")['tandem_kvstore_puts_total{result="stored"}']
                   >= before + full, 10, "the prompt is stored")
        again = ask(c, {"prompt": prompt, "temperature": 0}, "salt", tandem={"prefill": "decode-2"})
        assert again.headers["x-tandem-prefill"] == "decode-2"
        assert seen(again) == seen(clean)
        assert c.metrics("decode-2")['tandem_decode_prompt_tokens_total{source="store"}'] > 0
        assert again.usage["prompt_tokens_details"]["cached_tokens"] > 0
        c.wait_at_rest()


@test
def test_i1_many_at_once_on_a_pool_that_is_too_small(options):
    """They wait, give way and come back, with handed-over ones beside them."""
    with Cluster(options.bin, self_prefill=4096, kvstore=1, kv_memory="24M",
                 router_args=["--allow-placement", "--queue-ms", "60000"]) as c:
        teach(c)
        requests = [{"prompt": text_of(20 + 3 * i, i), "temperature": 0.8, "seed": i, "n": 1 + i % 2,
                     "max_tokens": 60, "logprobs": 1} for i in range(12)]
        expected = [seen(ask(c, request, "clean", tandem={"prefill": "prefill-1"}))
                    for request in requests]

        def one(i):
            where = {"prefill": "prefill-1" if i % 4 == 3 else "decode-1"}
            got = seen(ask(c, requests[i], "crowd", tandem=where))
            assert got == expected[i], (requests[i], got, expected[i])

        run_together([(i,) for i in range(len(requests))], one)
        assert self_prefills(c) > 0
        c.wait_at_rest()


@test
def test_i9_a_death_while_the_node_computes_for_itself(options):
    with Cluster(options.bin, self_prefill=4096, decode=2, kvstore=1,
                 router_args=["--allow-placement"]) as c:
        teach(c)
        for number, sig in enumerate((signal.SIGKILL, signal.SIGTERM)):
            request = {"prompt": text_of(50, number), "temperature": 0.9, "seed": number, "n": 2,
                       "max_tokens": 60}
            clean = ask(c, request, f"clean{number}", tandem={"decode": "decode-1"})
            stream = c.complete(request["prompt"], stream=True, ignore_eos=True,
                                cache_salt=f"broken{number}", tandem={"prefill": "decode-2"},
                                **{key: value for key, value in request.items() if key != "prompt"})
            texts = {0: "", 1: ""}
            command = None
            for count, event in enumerate(stream):
                for choice in event["choices"]:
                    texts[choice["index"]] += choice["text"]
                if count == 9:
                    command = c.end("decode-2", sig)
            assert stream.done
            assert [texts[0], texts[1]] == clean.texts
            c.start("decode-2", command)
            wait_until(lambda: c.live() == 4, 20, "back")
        c.wait_at_rest()


@test
def test_a_long_prompt_and_a_busy_node_are_left_to_prefill_nodes(options):
    with Cluster(options.bin, self_prefill=64, kvstore=0, router_args=["--allow-placement"]) as c:
        teach(c)
        assert ask(c, {"prompt": text_of(90)}, "long").headers["x-tandem-prefill"] == "prefill-1"
        short = []  # what it takes is tried, also where it seems slower, and learned

        def chosen():
            short.append(ask(c, {"prompt": text_of(10)}, f"short{len(short)}", max_tokens=1))
            return short[-1].headers["x-tandem-prefill"] == "decode-1"

        wait_until(chosen, 60, "a short prompt is computed by the decode node")
        assert self_prefills(c) > 0
        # Its own log-probabilities a prompt gets from prefill nodes alone.
        refused = c.complete("Hi", echo=True, logprobs=1, max_tokens=1, check=False,
                             tandem={"prefill": "decode-1"})
        assert refused.status == 400 and refused.json["error"]["code"] == "no_such_node"
        busy = [c.complete(text_of(10, i), stream=True, max_tokens=4000, ignore_eos=True,
                           tandem={"prefill": "prefill-1"}) for i in range(6)]
        for stream in busy:
            next(iter(stream))
        # Six others would wait as long as it takes. Now and then one is tried all the same.
        by = [ask(c, {"prompt": text_of(11)}, f"others{i}", max_tokens=2).headers["x-tandem-prefill"]
              for i in range(3)]
        assert by.count("prefill-1") >= 2, by
        for stream in busy:
            stream.close()
        c.wait_at_rest()


if __name__ == "__main__":
    main(__doc__)
