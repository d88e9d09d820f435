#!/usr/bin/env python3
"""Tenants, by API key: whose requests wait for whose, what limits refuse, which files of keys do."""
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import ROOT, Cluster, main, test, wait_until

MODEL = os.path.join(ROOT, "build/models/SmolLM2-135M-Instruct.Q4_1.gguf")
BLOCK_BYTES = 368640  # 16 tokens of the quick start's model
KEYS = """\
# flood and small have the same share, heavy three times light's
sk-flood name=flood
sk-small name=small
sk-heavy name=heavy weight=3
sk-light name=light weight=1
sk-two name=two requests=2
sk-few name=few requests-per-minute=3
sk-few-new name=few
sk-short name=short tokens-per-minute=200
sk-bare
"""
PROMPT = "A list of animals, one after the other:"


class Keys:
    """A file of keys that only its owner may read."""

    def __init__(self, text=KEYS):
        self.file = tempfile.NamedTemporaryFile("w", suffix=".keys")  # mode 0600
        self.file.write(text)
        self.file.flush()
        self.name = self.file.name

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()


def tenants_cluster(options, keys, *router_args, blocks=10):
    """One decode node, with room for one request of `SHORT` or more tokens at a time."""
    return Cluster(options.bin, kvstore=0, http_timeout_s=600,
                   decode_args=["--kv-memory", str(blocks * BLOCK_BYTES)],
                   router_args=["--api-key-file", keys.name, "--queue-ms", "600000", *router_args])


SHORT = 90


def order_drain(c, command):
    """While its decode node is drained, requests wait in the router, all of them."""
    subprocess.run([os.path.join(c.bin, "tandemctl"), "--keys", os.path.join(c.run_dir, "admin"), command,
                    "decode-1"], check=True, stdout=subprocess.DEVNULL, timeout=30)


def ask(c, key, prompt=PROMPT, stream=False, **parameters):
    return c.request("POST", "/v1/completions", {"prompt": prompt, "temperature": 0, "ignore_eos": True,
                                                 "stream": stream, **parameters},
                     stream=stream, headers={"Authorization": f"Bearer {key}"})


def of_tenant(c, name, metric, **labels):
    wanted = ",".join([f'tenant="{name}"', *(f'{key}="{value}"' for key, value in labels.items())])
    return c.metrics()[f"tandem_router_tenant_{metric}{{{wanted}}}"]


def waiting(c):
    return c.metrics()["tandem_router_queue_tickets"]


def served_in_order(c, jobs):
    """Sends requests (key, parameters), each once the one before it waits in the router, lets the
    node go, and answers their places in jobs in the order in which they ended: one at a time."""
    order = []
    lock = threading.Lock()
    wrong = []

    def one(index, key, parameters):
        answer = ask(c, key, **parameters)
        with lock:
            order.append(index)
            if answer.status != 200:
                wrong.append((index, answer.status, answer.json))

    order_drain(c, "drain")
    threads = [threading.Thread(target=one, args=(index, *job)) for index, job in enumerate(jobs)]
    for number, thread in enumerate(threads, 1):
        thread.start()
        c.wait_until(lambda count=number: waiting(c) == count, 60, f"{number} wait")
    order_drain(c, "undrain")
    for thread in threads:
        thread.join()
    assert not wrong, wrong
    return order


@test
def test_who_floods_holds_up_nobody_else(options):
    with Keys() as keys, tenants_cluster(options, keys) as c:
        flood = [("sk-flood", {"max_tokens": SHORT, "prompt": f"{PROMPT} {i}"}) for i in range(9)]
        small = [("sk-small", {"max_tokens": SHORT, "prompt": f"{PROMPT} {i}"}) for i in range(3)]
        order = served_in_order(c, flood + small)  # the small one comes last, and takes turns
        assert ["small" if index >= len(flood) else "flood" for index in order] == \
            ["flood", "small"] * 3 + ["flood"] * 6, order
        assert [index for index in order if index < len(flood)] == list(range(9)), order
        assert of_tenant(c, "small", "waits_total") == 3 and of_tenant(c, "flood", "waits_total") == 9
        assert of_tenant(c, "small", "wait_seconds_total") > 0
        assert of_tenant(c, "small", "tokens_total", kind="completion") == 3 * SHORT
        assert of_tenant(c, "small", "requests_total", outcome="ok") == 3
        assert of_tenant(c, "flood", "requests_running") == of_tenant(c, "flood", "queue_tickets") == 0
        c.wait_at_rest(["decode-1"], 10)


@test
def test_tokens_are_given_as_the_weights(options):
    with Keys() as keys, tenants_cluster(options, keys) as c:
        jobs = [("sk-light", {"max_tokens": SHORT + 5 * (i * 5 % 8)}) for i in range(8)] + \
               [("sk-heavy", {"max_tokens": SHORT + 5 * (i * 5 % 9)}) for i in range(12)]
        order = served_in_order(c, jobs)
        tokens = {"sk-light": 0, "sk-heavy": 0}
        heavy_left = 12
        for index in order:  # counted in tokens of answers, not in time
            key, parameters = jobs[index]
            tokens[key] += parameters["max_tokens"]
            heavy_left -= key == "sk-heavy"
            # By weight they differ by a request of each at most, while both wait.
            if heavy_left > 0:
                cost_max = SHORT + 40 + 20  # and a prompt
                assert abs(tokens["sk-heavy"] / 3 - tokens["sk-light"]) <= cost_max / 3 + cost_max, (order, tokens)
        assert 8 <= [jobs[index][0] for index in order[:12]].count("sk-heavy") <= 10, order
        for name, count in tokens.items():
            assert of_tenant(c, name[3:], "tokens_total", kind="completion") == count


@test
def test_lower_priorities_come_first(options):
    with Keys() as keys, tenants_cluster(options, keys) as c:
        jobs = [("sk-flood", {"max_tokens": SHORT, "priority": priority}) for priority in (0, 1, -1, 0)]
        assert served_in_order(c, jobs) == [2, 0, 3, 1]


@test
def test_a_full_queue_has_room_for_who_has_less_of_it(options):
    with Keys() as keys, tenants_cluster(options, keys, "--queue-max", "4") as c:
        answers = {}

        def one(name, key):
            answers[name] = ask(c, key, max_tokens=SHORT)

        order_drain(c, "drain")
        threads = []
        for number in range(1, 5):
            threads.append(threading.Thread(target=one, args=(f"flood-{number}", "sk-flood")))
            threads[-1].start()
            c.wait_until(lambda count=number: waiting(c) == count, 60, f"{number} wait")
        assert ask(c, "sk-flood", max_tokens=SHORT).json["error"]["code"] == "queue_full"
        threads.append(threading.Thread(target=one, args=("small", "sk-small")))
        threads[-1].start()
        c.wait_until(lambda: "flood-4" in answers, 60, "the newest of the flood gives way")
        assert answers["flood-4"].status == 429 and int(answers["flood-4"].headers["retry-after"]) > 0
        assert answers["flood-4"].json["error"]["code"] == "queue_full"
        assert waiting(c) == 4 and of_tenant(c, "small", "queue_tickets") == 1
        order_drain(c, "undrain")
        for thread in threads:
            thread.join()
        assert [name for name, answer in answers.items() if answer.status != 200] == ["flood-4"]


@test
def test_limits_are_told_and_refuse(options):
    with Keys() as keys, tenants_cluster(options, keys, blocks=128) as c:
        plain = ask(c, "sk-bare", max_tokens=1)
        assert plain.status == 200 and not [name for name in plain.headers if "ratelimit" in name.lower()]
        # Requests a minute: both keys of a tenant count together.
        for left, key in ((2, "sk-few"), (1, "sk-few-new"), (0, "sk-few")):
            answer = ask(c, key, max_tokens=1)
            assert answer.status == 200, answer.json
            assert answer.headers["x-ratelimit-limit-requests"] == "3"
            assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
            assert re.fullmatch(r"\d+(\.\d{3})?s|\d+ms|1m0.000s", answer.headers["x-ratelimit-reset-requests"])
            assert answer.headers["x-ratelimit-limit-tokens"] is None
        refused = ask(c, "sk-few-new", max_tokens=1)
        assert refused.status == 429 and refused.json["error"]["code"] == "rate_limit_exceeded"
        assert "3 requests a minute" in refused.json["error"]["message"]
        assert 1 <= int(refused.headers["retry-after"]) <= 20
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert of_tenant(c, "few", "limited_total", limit="requests-per-minute") == 1
        # Tokens a minute: what an answer did not use comes back.
        first = ask(c, "sk-short", max_tokens=150, stop=[" "])
        assert first.status == 200 and first.headers["x-ratelimit-limit-tokens"] == "200"
        assert int(first.headers["x-ratelimit-remaining-tokens"]) < 50
        stream = ask(c, "sk-short", max_tokens=100, stream=True)
        assert int(stream.headers["x-ratelimit-remaining-tokens"]) < 100
        stream.collect()
        refused = ask(c, "sk-short", max_tokens=180)
        assert refused.status == 429 and "200 tokens a minute" in refused.json["error"]["message"]
        assert int(refused.headers["retry-after"]) > 1
        # Requests at a time, those that wait among them.
        streams = [ask(c, "sk-two", stream=True, max_tokens=400) for _ in range(2)]
        refused = ask(c, "sk-two", max_tokens=1)
        assert refused.status == 429 and "2 requests at a time" in refused.json["error"]["message"]
        assert refused.headers["retry-after"] == "1"
        streams.pop().close()
        c.wait_until(lambda: of_tenant(c, "two", "requests_running") == 1, 10, "it has left")
        assert ask(c, "sk-two", max_tokens=1).status == 200
        streams.pop().close()
        c.wait_until(lambda: of_tenant(c, "two", "requests_running") == 0, 10, "it has left")
        shown = c.request("GET", "/metrics").body.decode() + c.log("router")
        assert "sk-" not in shown and 'tenant="key:' in shown
        c.wait_at_rest(["decode-1"], 10)


@test
def test_wrong_files_of_keys_are_refused_with_the_line(options):
    wrong = (("sk-a\n# ok\nsk-b weight=0\n", 3, "weight=1 to 1000"),
             ("sk-a color=red\n", 1, "name=, weight="),
             ("\nsk-a\nsk-a\n", 3, "each key once"),
             ("sk-a name=x weight=2\nsk-b name=x weight=3\n", 2, "the first key of that name"),
             ("sk-a requests-per-minute=many\n", 1, "requests-per-minute=1 to"),
             ("sk-a cache=none\n", 1, "cache=own or cache=shared"),
             ("sk-a\nsk-b\0 requests=1\n", 2, "no NUL byte"),
             ("\ufeffsk-a\n", 1, "no byte order mark"),
             ("sk-a\nsk-" + "b" * 1100 + "\n", 2, "at most 1022 bytes"),
             ("blake2b:12ab\n", 1, "64 hexadecimal digits"),
             (f"sk-a\nblake2b:{hashlib.blake2b(b'sk-a', digest_size=32).hexdigest()}\n", 2,
              "each key once"))
    for text, line, words in wrong:
        with Keys(text) as keys:
            done = subprocess.run(
                [os.path.join(options.bin, "tandem-router"), "--model", MODEL, "--http", "127.0.0.1:0",
                 "--listen", "tcp://127.0.0.1:*", "--api-key-file", keys.name],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, timeout=60)
            said = done.stdout.decode()
            assert done.returncode == 1 and f"line={line} " in said and words in said, said
            assert "sk-" not in said, said


@test
def test_each_tenant_has_a_cache_of_its_own(options):
    """I4 among tenants: what one has asked is not found by another, at the same salt or none; the answers are
    the same. Those who share say so. Pins name a tenant."""
    made = subprocess.run([os.path.join(options.bin, "tandemctl"), "apikey", "one"], check=True,
                          stdout=subprocess.PIPE, text=True, timeout=30).stdout.splitlines()
    key, line = made
    assert line == f"blake2b:{hashlib.blake2b(key.encode(), digest_size=32).hexdigest()} name=one"
    hashed = hashlib.blake2b(b"sk-one-too", digest_size=32).hexdigest()
    text = f"{line}\nblake2b:{hashed.upper()} name=one\nsk-two\nsk-s1 cache=shared\nsk-s2 name=s2 cache=shared\n"
    prompt = PROMPT + " cat, dog, horse, cow, sheep, goat, pig, hen, duck, goose, bee, ant," * 3
    with Keys(text) as keys, \
            Cluster(options.bin, router_args=["--api-key-file", keys.name]) as c:
        model = None

        def ask(key, **more):
            nonlocal model
            headers = {"Authorization": f"Bearer {key}"}
            model = model or c.request("GET", "/v1/models", headers=headers,
                                       check=True).json["data"][0]["id"]
            got = c.request("POST", "/v1/completions", {
                "model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0,
                "ignore_eos": True, **more}, headers=headers, check=True)
            return got.text, got.usage["prompt_tokens_details"]["cached_tokens"]
        # The hash is as good as the key itself, and is none.
        assert c.request("GET", "/v1/models", headers={
            "Authorization": f"Bearer {line.split()[0]}"}).status == 401
        first, cached = ask(key)
        assert cached == 0
        assert ask(key)[0] == first and ask(key)[1] > 0
        assert ask("sk-one-too") == (first, ask(key)[1])  # another key of the same tenant
        assert ask("sk-two") == (first, 0)  # a stranger finds nothing
        assert ask(key, cache_salt="x") == (first, 0)  # a salt parts it once more
        assert ask("sk-two", cache_salt="x") == (first, 0)
        assert ask("sk-s1") == (first, 0)
        assert ask("sk-s2")[1] > 0 and ask("sk-s2")[0] == first

        def store(*arguments):
            done = subprocess.run(
                [os.path.join(c.bin, "tandemctl"), "--keys", os.path.join(c.run_dir, "admin"),
                 "--json", *arguments, "--prompt", prompt], stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, check=False, text=True, timeout=30)
            return json.loads(done.stdout) if done.returncode == 0 else done.stderr
        wait_until(lambda: store("pin", "--tenant", "one")["done"] > 0, 20, "its blocks are pinned")
        keys_of = {name: [b["key"] for b in store("unpin", *arguments)["blocks"]] for name, arguments in (
            ("one", ("--tenant", "one")), ("s2", ("--tenant", "s2")), ("none", ()))}
        assert keys_of["s2"] == keys_of["none"] and not set(keys_of["one"]) & set(keys_of["none"])
        assert "tenants" in store("pin", "--tenant", "nobody")


if __name__ == "__main__":
    main(__doc__)
