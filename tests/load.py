"""Clients that ask a cluster all the time, while others do harm to it, and compare each answer with the
undisturbed one: text, tokens, the logits' hashes, log-probabilities, reasons and usage."""
import http.client
import random
import threading

from cluster import HTTPError, choice_text, wait_until

ROUTERS = ("router", "router-2")


class Broken(Exception):
    """The router's connection broke off, or it refused for now: ask the other one."""


class Refused(Exception):
    """An error in OpenAI form, which only who nobody could serve may get."""


def lists(logprobs):
    """Of a choice: {name: list}, for completions and for chats."""
    return {name: value for name, value in (logprobs or {}).items() if isinstance(value, list)}


def collect(stream, on_event=None):
    """What of a stream must not depend on what happens meanwhile: choices by index, and usage.

    on_event(count): asked after each event; True ends the reading there."""
    choices, usage = {}, None
    for count, event in enumerate(stream, 1):
        if "error" in event:
            raise Refused(openai_error(event))
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            got = choices.setdefault(choice["index"], {"text": "", "finish": [], "tokens": [],
                                                       "hashes": [], "logprobs": {}})
            got["text"] += choice_text(choice)
            got["finish"] += [choice["finish_reason"]] if choice.get("finish_reason") else []
            got["tokens"] += event.get("tandem", {}).get("tokens", [])
            got["hashes"] += event.get("tandem", {}).get("logits_xxh", [])
            for name, value in lists(choice.get("logprobs")).items():
                got["logprobs"].setdefault(name, []).extend(value)
        if on_event is not None and on_event(count):
            return choices, None
    if not stream.done:
        raise Broken("no [DONE]")
    return choices, usage["completion_tokens"]


def openai_error(body):
    """The message of an error, which must have OpenAI's form."""
    error = body["error"]
    assert isinstance(error["message"], str) and error["message"] and "type" in error, body
    return error["message"]


def whole(answer):
    """The same of an answer that came at once."""
    tandem = answer.json.get("tandem", {})
    return ({choice["index"]: {"text": choice_text(choice), "finish": [choice["finish_reason"]],
                               "tokens": tandem.get("tokens", {}), "hashes": tandem.get("logits_xxh"),
                               "logprobs": lists(choice.get("logprobs"))}
             for choice in answer.choices}, answer.usage["completion_tokens"])


def ask(cluster, router, request, elsewhere=(), on_event=None, headers=None, timeout_s=None):
    """Choices and the count of tokens. request: a body, with "messages" for a chat.

    elsewhere: statuses by which a router says: not now. Broken and Refused say what there was else."""
    path = "/v1/chat/completions" if "messages" in request else "/v1/completions"
    streamed = request.get("stream", False)
    body = dict(request)
    if streamed:
        body["stream_options"] = {"include_usage": True}
    try:
        answer = cluster.request("POST", path, body, streamed, headers, timeout_s, to=router,
                                 check=True)
        if not streamed:
            return whole(answer)
        with answer:
            return collect(answer, on_event)
    except (ConnectionError, http.client.HTTPException) as error:
        raise Broken(repr(error)) from error
    except HTTPError as error:
        message = openai_error(error.response.json)
        if error.status in elsewhere:
            raise Broken(message) from error
        raise Refused(f"{error.status}: {message}") from error


class Load:
    """Clients in the background, from __enter__ to __exit__, which raises what any of them saw wrong.

    requests: bodies whose answers depend on nothing else. Half of the clients begin with either router.
    A client whose router falls asks the other one; every other error is a failure."""

    def __init__(self, cluster, requests, clients=6, salts=4, fresh=0.0, routers=ROUTERS,
                 elsewhere=()):
        self.cluster = cluster
        self.requests = list(requests)
        self.routers = routers
        self.elsewhere = elsewhere
        self.salts = salts
        self.fresh = fresh  # share of requests whose prompts nobody has
        self.count = clients
        self.expected = []
        self.answered = 0  # counts, so that nothing is lost where one thread overtakes another
        self.done = threading.Event()
        self.wrong = []
        self.threads = []
        self._lock = threading.Lock()

    def learn(self):
        """The undisturbed answers, and that both routers give them."""
        self.expected = [self.ask(self.routers[number % len(self.routers)], number, "clean")
                         for number in range(len(self.requests))]

    def ask(self, router, which, salt):
        body = {"ignore_eos": True, "cache_salt": salt, **self.requests[which]}
        return ask(self.cluster, router, body, self.elsewhere)

    def ask_any(self, first, which, salt):
        for turn in range(2000):  # a router comes back after some
            try:
                return self.ask(self.routers[(first + turn) % len(self.routers)], which, salt)
            except Broken:
                continue
        raise AssertionError("no router answers")

    def client(self, number):
        draw = random.Random(number)
        while not self.done.is_set():
            which = draw.randrange(len(self.requests))
            salt = f"load{draw.randrange(self.salts)}"
            if draw.random() < self.fresh:
                salt = f"fresh{number}-{draw.getrandbits(64)}"
            got = self.ask_any(number, which, salt)
            assert got == self.expected[which], (which, got, self.expected[which])
            with self._lock:
                self.answered += 1

    def _run(self, number):
        try:
            self.client(number)
        except Exception as error:  # raised again by who waits
            self.wrong.append((number, repr(error)[:3000]))
            self.done.set()

    def __enter__(self):
        if not self.expected:
            self.learn()
        self.done.clear()
        self.threads = [threading.Thread(target=self._run, args=(number,))
                        for number in range(self.count)]
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, kind, *_):
        self.done.set()
        for thread in self.threads:
            thread.join()
        if kind is None:
            self.raise_wrong()

    def raise_wrong(self):
        assert not self.wrong, self.wrong

    def wait_answers(self, count, seconds=60, what="answers go on"):
        """So many more than now."""
        before = self.answered
        wait_until(lambda: self.answered >= before + count or self.wrong, seconds, what)
        self.raise_wrong()


def damaged(cluster):
    """Blocks that came and were not the named ones, by process. Where processes fall, sleep and wake there may
    be some: it is found out, and they are computed anew."""
    return {process_id: cluster.metrics(process_id)[f"tandem_{entry['role']}_checksum_failures_total"]
            for process_id, entry in cluster.processes.items()
            if entry["role"] in ("prefill", "decode", "kvstore")}


def check_at_rest(cluster, seconds=30):
    """Once nobody asks: nobody holds, waits for or runs anything."""
    held = {}

    def look():
        held.clear()
        for process_id, entry in cluster.processes.items():
            role = entry["role"]
            if role != "etcd":
                held.update({f"{process_id} {name}": value for name, value in
                             cluster.metrics(process_id).items()
                             if value and name.startswith(AT_REST[role])})
        return not held

    try:
        wait_until(look, seconds, "nothing is held at rest")
    except AssertionError as error:
        raise AssertionError(f"{error}: {held}") from error


# Series that are zero when nobody asks for anything.
BLOCKS = tuple(f'kv_blocks{{state="{state}"}}' for state in ("reserved", "active", "quarantined"))
AT_REST = {
    "router": ("tandem_router_requests_running", "tandem_router_queue_tickets",
               "tandem_router_tenant_requests_running", "tandem_router_tenant_queue_tickets"),
    "prefill": ("tandem_prefill_requests_running", *(f"tandem_prefill_{series}" for series in BLOCKS)),
    "decode": ("tandem_decode_requests_running", *(f"tandem_decode_{series}" for series in BLOCKS),
               *(f"tandem_decode_draft_{series}" for series in BLOCKS)),
    # A reader's lease makes a block active for a while, and a pin for as long as it is there.
    "kvstore": ("tandem_kvstore_segments_telling", *(f"tandem_kvstore_{series}" for series in (BLOCKS[0], BLOCKS[2])))}


def mixed_requests(tokens=(40, 60, 90)):
    """Streams and whole answers, several choices, log-probabilities, prompts of one block to many."""
    for number, prompt in enumerate(
            "A walk along the canal takes an hour, and the bridges have names. " * repeat
            for repeat in (2, 9, 20)):
        yield {"prompt": prompt, "max_tokens": tokens[0], "temperature": 0,
               "stream": True}
        yield {"prompt": prompt, "max_tokens": tokens[1], "temperature": 0.9, "seed": number,
               "n": 2}
        yield {"prompt": prompt, "max_tokens": tokens[2], "temperature": 0.7, "seed": 50 + number,
               "logprobs": 1, "stream": True}
