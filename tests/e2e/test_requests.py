"""What a request may ask for, through the real cluster; and that nothing is left behind (I5)."""
import concurrent.futures
import os
import random
import sys
import threading

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import Cluster, main, test

def outcome(c, name):
    return c.metrics("router").get(f'tandem_router_requests_total{{outcome="{name}"}}', 0)


@test
def test_f16_max_tokens_are_exact_in_split_mode(options):
    with Cluster(options.bin) as c:
        for n in (1, 2, 17):
            reply = c.chat("Count to one hundred.", max_tokens=n, temperature=0)
            assert reply.usage["completion_tokens"] == n
            assert reply.choices[0]["finish_reason"] == "length"
        reply = c.chat("Say hi.", max_tokens=40, min_tokens=30, temperature=0)
        assert reply.usage["completion_tokens"] >= 30
        c.wait_at_rest()


@test
def test_absent_max_tokens_means_up_to_the_context(options):
    with Cluster(options.bin, decode_args=["--context-max", "96"],
                 prefill_args=["--context-max", "96"], router_args=["--context-max", "96"]) as c:
        reply = c.complete("Once upon a time", temperature=0, ignore_eos=True)
        usage = reply.usage
        assert usage["prompt_tokens"] + usage["completion_tokens"] == 96, usage
        assert reply.choices[0]["finish_reason"] == "length"
        too_long = c.complete("word " * 200, check=False)
        assert too_long.status == 400
        assert too_long.json["error"]["code"] == "context_length_exceeded"
        c.wait_at_rest()


@test
def test_stop_strings_end_the_text_before_them(options):
    with Cluster(options.bin) as c:
        plain = c.complete("1, 2, 3, 4,", max_tokens=24, temperature=0).text
        at = plain.index(", 7")
        cut = c.complete("1, 2, 3, 4,", max_tokens=24, temperature=0, stop=[", 7", "never"])
        assert cut.text == plain[:at], (plain, cut.text)
        assert cut.choices[0]["finish_reason"] == "stop"
        stream = c.complete("1, 2, 3, 4,", stream=True, max_tokens=24, temperature=0,
                            stop=[", 7"]).collect()
        assert stream.text == plain[:at]
        c.wait_at_rest()


def tokens_to(tokens, stops):
    """How many of the tokens there are up to the first that completes one of the strings."""
    text = ""
    for count, token in enumerate(tokens, 1):
        text += token
        if any(stop in text for stop in stops):
            return count
    return len(tokens)


@test
def test_i1_a_stop_string_voids_the_step_under_way(options):
    """Text is made while the next step runs, so a stop string is found when its choice has a step
    more under way: nothing of that is seen, counted or kept, and the others go on."""
    with Cluster(options.bin, kvstore=0) as c:
        request = {"prompt": "Once upon a time there was", "max_tokens": 60, "temperature": 0.9,
                   "seed": 5, "n": 4, "logprobs": 0, "ignore_eos": True}
        stops = [" who", " a ", "."]
        for speculation in ({"drafter": "none"}, {"drafter": "prompt_lookup", "k": 4},
                            {"drafter": "early_exit", "k": 3}):
            full = c.complete(speculation=speculation, **request)
            cut = c.complete(speculation=speculation, stop=stops, **request)
            counts = [tokens_to(choice["logprobs"]["tokens"], stops) for choice in full.choices]
            assert min(counts) < max(counts) and max(counts) > 2, counts
            assert cut.usage["completion_tokens"] == sum(counts), (cut.usage, counts)
            for whole, part, count in zip(full.choices, cut.choices, counts):
                assert part["logprobs"]["tokens"] == whole["logprobs"]["tokens"][:count]
                assert whole["text"].startswith(part["text"])
                assert not any(stop in part["text"] for stop in stops), part["text"]
        assert c.metrics(c.ids("decode")[0])["tandem_decode_overlapped_steps_total"] > 0
        c.wait_at_rest()


@test
def test_an_objective_that_cannot_be_met_is_refused_early(options):
    with Cluster(options.bin, kvstore=0) as c:
        prompt = "Once upon a time there was a river. " * 40

        def ask(number, headers):
            body = {"model": c.model, "prompt": f"{number} {prompt}", "max_tokens": 40,
                    "ignore_eos": True}
            return c.request("POST", "/v1/completions", body, headers=headers)

        for number in range(3):
            assert ask(number, {}).status == 200
        for name, code in (("x-slo-ttft-ms", "slo_ttft"), ("x-slo-tbt-ms", "slo_tbt")):
            refused = ask(name, {name: "1"})
            assert refused.status == 429 and refused.json["error"]["code"] == code, refused.body
            assert int(refused.headers["Retry-After"]) >= 1
            assert ask(f"{name} again", {name: "60000"}).status == 200
            assert ask("wrong", {name: "soon"}).status == 400
        assert c.metrics()['tandem_router_slo_refusals_total{slo="ttft"}'] == 1
        c.wait_at_rest()


@test
def test_logprobs_echo_and_n(options):
    with Cluster(options.bin) as c:
        reply = c.complete("The capital of France is", max_tokens=3, temperature=0, logprobs=2,
                           echo=True)
        data = reply.choices[0]["logprobs"]
        assert data["token_logprobs"][0] is None
        assert len(data["tokens"]) == reply.usage["prompt_tokens"] + 3
        assert all(value <= 0 for value in data["token_logprobs"][1:])
        assert reply.text.startswith("The capital of France is")
        many = c.chat("Name a colour.", n=4, max_tokens=6, temperature=1.0, seed=3)
        assert sorted(choice["index"] for choice in many.choices) == [0, 1, 2, 3]
        assert many.usage["completion_tokens"] <= 24
        c.wait_at_rest()


@test
def test_requests_that_end_with_their_first_token(options):
    with Cluster(options.bin) as c, concurrent.futures.ThreadPoolExecutor(8) as pool:
        ask = lambda i: c.chat("word " * (50 + i * 7) + str(i), max_tokens=1, n=1 + i % 3)
        for reply in pool.map(ask, range(40)):
            assert all(choice["finish_reason"] in ("length", "stop") for choice in reply.choices)
        assert c.alive("decode-1")
        c.wait_at_rest()


@test
def test_i5_vanishing_clients_leave_nothing(options):
    total = 200
    with Cluster(options.bin, router_args=["--queue-max", "1000", "--queue-ms", "60000"]) as c:
        c.chat("Warm up.", max_tokens=4)
        rng = random.Random(42)
        plans = [(rng.randrange(0, 12), rng.randrange(1, 400), rng.random() < 0.3)
                 for _ in range(total)]

        def one(plan):
            events, words, before_answer = plan
            body = {"model": c.model, "messages": [{"role": "user", "content": "word " * words}],
                    "stream": True, "max_tokens": 64, "temperature": 0, "ignore_eos": True}
            if before_answer:
                # Gone before a byte of the answer is read.
                import http.client
                host, port = c.address.rsplit(":", 1)
                import json
                connection = http.client.HTTPConnection(host, int(port), timeout=60)
                connection.request("POST", "/v1/chat/completions", json.dumps(body).encode())
                threading.Event().wait(events / 100)
                connection.sock.close()
                connection.close()
                return
            stream = c.request("POST", "/v1/chat/completions", body, stream=True)
            for seen, _ in enumerate(stream):
                if seen >= events:
                    break
            stream.close()

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(one, plans))
        c.wait_at_rest()
        names = ("ok", "client_gone", "rejected", "bad_request", "upstream_error", "timeout",
                 "shutdown")
        c.wait_until(lambda: sum(outcome(c, name) for name in names) == total + 1, 10,
                     "every request ended once")
        assert outcome(c, "client_gone") > total // 2
        assert outcome(c, "upstream_error") == 0
        assert c.metrics("router")["tandem_router_requests_running"] == 0
        assert c.chat("Still there?", max_tokens=4).status == 200


@test
def test_f3_a_client_gone_before_the_first_token_stops_the_prefill(options):
    with Cluster(options.bin, prefill_args=["--chunk-tokens", "16"]) as c:
        c.chat("Warm up.", max_tokens=1)
        host, port = c.address.rsplit(":", 1)
        import http.client
        import json
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
        before = c.metrics("prefill-1")['tandem_prefill_prompt_tokens_total{source="computed"}']
        body = {"model": c.model, "prompt": [1000 + i % 30000 for i in range(8000)], "max_tokens": 5}
        connection.request("POST", "/v1/completions", json.dumps(body).encode())
        computed = lambda: c.metrics("prefill-1")[
            'tandem_prefill_prompt_tokens_total{source="computed"}'] - before
        c.wait_until(lambda: computed() > 0, 20, "the prefill has begun")
        connection.sock.close()
        connection.close()
        c.wait_at_rest()
        assert computed() < 7900, "the prefill went on to its end"


if __name__ == "__main__":
    main(__doc__)
