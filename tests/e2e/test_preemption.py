"""A decode node whose memory is far too small for all that runs: requests give way, come back, and say
what they would have said alone."""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import Cluster, main, run_together, test

BLOCK_BYTES = 368640  # 16 tokens of the quick start's model
PROMPTS = [f"Tell me a story about {animal} number {number}."
           for number in range(1, 6) for animal in ("a fox", "two owls", "the bear", "an ant", "my cat",
                                                    "one whale", "a horse", "the bees", "a newt", "an elk")]


def ask(c, index, **more):
    return c.complete(PROMPTS[index], max_tokens=100, temperature=0.8, seed=index, ignore_eos=True,
                      logprobs=1, **more)


def ask_all(c, count, **more):
    """The answers to so many prompts at once."""
    answers = [None] * count

    def one(index):
        answers[index] = ask(c, index, **more)

    run_together([(index,) for index in range(count)], one)
    return answers


def same(a, b):
    return a.text == b.text and a.choices[0]["logprobs"] == b.choices[0]["logprobs"]


def expect_short_outputs(c, count=20):
    """Until the node promises a request little more than its prompt."""
    for _ in range(count):
        c.complete("Hi", max_tokens=1)


@test
def test_i1_fifty_requests_in_a_tiny_pool_all_finish_with_their_own_words(options):
    # 7 blocks a request at its end, 24 in the pool: three of fifty fit.
    with Cluster(options.bin, decode_args=["--kv-memory", str(24 * BLOCK_BYTES)],
                 router_args=["--queue-ms", "600000"], http_timeout_s=600) as c:
        expect_short_outputs(c)
        answers = ask_all(c, len(PROMPTS))
        metrics = c.metrics("decode-1")
        assert metrics["tandem_decode_preemptions_total"] > 0
        for source in ("cache", "store", "computed"):
            assert metrics[f'tandem_decode_returned_tokens_total{{source="{source}"}}'] > 0, source
        for index in range(0, len(PROMPTS), 7):
            assert same(ask(c, index), answers[index]), PROMPTS[index]
        c.wait_at_rest(["decode-1"], 10)


@test
def test_i5_requests_that_wait_for_memory_can_be_cancelled(options):
    with Cluster(options.bin, decode_args=["--kv-memory", str(16 * BLOCK_BYTES)]) as c:
        expect_short_outputs(c)
        streams = [c.complete(PROMPTS[index], stream=True, max_tokens=100, seed=index, ignore_eos=True)
                   for index in range(4)]
        c.wait_until(lambda: c.metrics("decode-1")["tandem_decode_preemptions_total"] > 0, 60,
                     "somebody gave way")
        for stream in streams:
            stream.close()
        c.wait_at_rest(["decode-1"], 10)
        assert ask(c, 0).choices[0]["finish_reason"] == "length"


# --- several choices ------------------------------------------------------------------------------

# Two full blocks and a partial one, which the choices of a request share.
LONG = [f"Once upon a time, in a village by the sea, there lived {who} who had never seen a mountain. "
        "One day a traveller came and told everybody about the snow, and"
        for who in ("a fisherman", "two sisters", "an old king", "the baker", "a small boy", "my aunt")]


def several(index):
    """A request: its prompt, and what is asked of it. All differ in what a choice must not lose."""
    more = {"n": (2, 4, 3, 2, 4, 3)[index % 6], "max_tokens": 90, "temperature": 0.9, "seed": index,
            "ignore_eos": True, "logprobs": 2, "stream": index % 2 == 1}
    if index % 3 == 0:
        more["stop"] = [" mountain", ".\n\n", " great"]  # some choices end early
    if index % 3 == 1:
        more.update(frequency_penalty=0.7, presence_penalty=0.3, min_tokens=20)
    if index % 3 == 2:
        more.update(repetition_penalty=1.2, speculation={"drafter": "prompt_lookup", "k": 4})
    return LONG[index % len(LONG)], more


def answer_of(c, prompt, more):
    """Of each choice: its text, why it ended, and its tokens with their log-probabilities."""
    reply = c.complete(prompt, **more)
    events = reply.collect().events if more.get("stream") else [reply.json]
    whole = [["", None, [], [], []] for _ in range(more["n"])]
    for choice in (choice for event in events for choice in event.get("choices", [])):
        of = whole[choice["index"]]
        of[0] += choice["text"]
        of[1] = choice["finish_reason"] or of[1]
        if choice.get("logprobs"):
            for at, name in enumerate(("tokens", "token_logprobs", "top_logprobs"), 2):
                of[at] += choice["logprobs"][name]
    return whole


def answers_alone(options, requests, **cluster):
    """Each request's answer, one after the other, with memory for all."""
    with Cluster(options.bin, kvstore=0, http_timeout_s=600, **cluster) as c:
        answers = [answer_of(c, prompt, more) for prompt, more in requests]
        assert c.metrics("decode-1")["tandem_decode_preemptions_total"] == 0
        return answers


def check_together(c, requests, expected, happened, rounds=20):
    """The same answers when all are asked at once and have to give way; again, with nothing of
    before in the cache, until all has happened that the test is about."""
    answers = [None] * len(requests)

    def run(index, salt):
        prompt, more = requests[index]
        answers[index] = answer_of(c, prompt, {**more, "cache_salt": str(salt)})

    for salt in range(rounds):
        expect_short_outputs(c, 80)  # the outputs of a round before were long
        run_together([(index, salt) for index in range(len(requests))], run)
        for index, (got, wanted) in enumerate(zip(answers, expected)):
            assert got == wanted, (index, got, wanted)
        c.wait_at_rest(["decode-1"], 10)
        if happened(c):
            return
    raise AssertionError(f"not in {rounds} rounds: {c.log('decode-1')[-4000:]}")


def preempted(c):
    return c.metrics("decode-1")["tandem_decode_preemptions_total"] > 0


def computed_for_all(c):
    """One choice has computed a prompt again, the others waited for it."""
    return 'msg="prompt computed again"' in c.log("decode-1")


def came_back(c, *sources):
    metrics = c.metrics("decode-1")
    return all(metrics[f'tandem_decode_returned_tokens_total{{source="{source}"}}'] > 0
               for source in sources)


def tiny(options, blocks, **more):
    return Cluster(options.bin, decode_args=["--kv-memory", str(blocks * BLOCK_BYTES)],
                   router_args=["--queue-ms", "600000"], http_timeout_s=600, **more)


@test
def test_i1_requests_of_several_choices_give_way_and_say_the_same(options):
    # Nothing else runs, so whoever gives way has several choices.
    requests = [several(index) for index in range(8)]
    expected = answers_alone(options, requests)
    endings = {choice[1] for answer in expected for choice in answer}
    assert endings == {"stop", "length"}, endings
    with tiny(options, 36) as c:
        check_together(c, requests, expected, lambda c: came_back(c, "cache", "store", "computed"))


def four_to_the_end(count, max_tokens=90):
    """Requests of four choices, none of which ends before its last token."""
    requests = [several(index) for index in range(count)]
    for _, more in requests:
        more.update(n=4, max_tokens=max_tokens)
        more.pop("stop", None)
    return requests


@test
def test_i1_one_choice_computes_the_prompt_for_all(options):
    # Each needs 27 blocks at its end: who waits for it finds nothing of its own prompt.
    requests = four_to_the_end(4)
    expected = answers_alone(options, requests)
    with tiny(options, 27, kvstore=0) as c:
        check_together(c, requests, expected, computed_for_all)


@test
def test_i1_requests_of_one_choice_and_of_several_share_a_tiny_pool(options):
    requests = [several(index) for index in range(6)]
    for index in range(0, 6, 2):
        requests[index][1].update(n=1, priority=index)
    expected = answers_alone(options, requests)
    with tiny(options, 34) as c:
        check_together(c, requests, expected, preempted)


@test
def test_i1_several_choices_under_a_window_give_way(options):
    requests = four_to_the_end(6, 60)
    expected = answers_alone(options, requests, attention="window:48,4")
    for blocks, happened in ((23, preempted), (36, computed_for_all)):  # 23: one alone just fits
        with tiny(options, blocks, kvstore=0, attention="window:48,4") as c:
            check_together(c, requests, expected, happened)


@test
def test_i5_several_choices_that_wait_for_memory_can_be_cancelled(options):
    with tiny(options, 34) as c:
        expect_short_outputs(c)
        prompt, more = several(1)
        more.update(stream=True, n=4, max_tokens=90)
        streams = [c.complete(prompt, **{**more, "seed": seed, "cache_salt": str(seed)})
                   for seed in range(3)]
        c.wait_until(lambda: preempted(c), 60, "somebody gave way")
        for stream in streams:
            stream.close()
        c.wait_at_rest(["decode-1"], 10)
        assert [choice[1] for choice in answer_of(c, prompt, {**more, "n": 2})] == ["length"] * 2


@test
def test_f2_the_node_dies_while_several_choices_wait(options):
    requests = four_to_the_end(6)
    for _, more in requests:
        more["stream"] = False  # nothing has been sent yet, so another node may answer
    expected = answers_alone(options, requests)
    answers = [None] * len(requests)

    def run(index):
        answers[index] = answer_of(c, *requests[index])

    def waits():
        """A node on which somebody waits for memory now."""
        for node in c.ids("decode"):
            log = c.log(node)
            if log.count('msg="preempted"') > log.count('msg="resumed"'):
                return node
        return None

    def killer():
        c.kill(c.wait_until(waits, 60, "somebody gave way"))

    with tiny(options, 27, decode=2, kvstore=0) as c:
        expect_short_outputs(c, 80)  # a half on each node
        run_together([(run, index) for index in range(len(requests))] + [(killer,)],
                     lambda do, *index: do(*index))
        assert answers == expected
        left = [node for node in c.ids("decode") if c.alive(node)]
        assert len(left) == 1, left
        c.wait_at_rest([left[0]], 10)


@test
def test_f14_several_choices_that_could_never_fit_are_refused(options):
    with tiny(options, 26, kvstore=0) as c:
        expect_short_outputs(c)
        prompt, more = several(1)
        more.update(stream=False)
        refused = c.complete(prompt, check=False, **{**more, "n": 4})  # 27 blocks
        assert refused.status == 400 and "cannot serve" in refused.json["error"]["message"]
        assert len(c.complete(prompt, **{**more, "n": 3}).choices) == 3
        c.wait_at_rest(["decode-1"], 10)


if __name__ == "__main__":
    main()
