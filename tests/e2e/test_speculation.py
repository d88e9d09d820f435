"""Speculation changes how fast an answer comes, and not one token of it: with any drafter, any k, any
sampling, alone and in batches; and what it counts adds up."""
import functools
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import Cluster, HTTPError, main, run_together, shared, test, wait_until
import speculation
from speculation import BASE_SAMPLINGS, COPY, FREE, same_in_batches, same_with_endings

ask = functools.partial(speculation.ask, max_tokens=48)
SAMPLINGS = [*BASE_SAMPLINGS, {"temperature": 0.7, "seed": 9, "logit_bias": {"253": -5, "260": 2}}]


def cluster(options):
    return shared(options, router_args=["--allow-placement"])


def accepted(details):
    return details["accepted_prediction_tokens"]


@test
def test_i1_speculation_any_k_gives_the_same_tokens(options):
    c = cluster(options)
    for prompt in (COPY, FREE):
        for sampling in SAMPLINGS:
            expected, details = ask(c, prompt, {"drafter": "none"}, **sampling)
            assert accepted(details) == details["rejected_prediction_tokens"] == 0
            for drafter in ("prompt_lookup", "memo", "lookahead"):
                for k in range(0, 9):
                    got, details = ask(c, prompt, {"drafter": drafter, "k": k}, **sampling)
                    assert got == expected, (prompt, sampling, drafter, k, got, expected)
                    assert k > 0 or accepted(details) == 0
            got, _ = ask(c, prompt, None, **sampling)
            assert got == expected, (prompt, sampling, "auto")


@test
def test_i1_speculation_with_stops_choices_and_minimum(options):
    same_with_endings(cluster(options), ask, ["auto", "lookahead"])


@test
def test_i1_speculation_in_batches_with_other_lengths_of_draft(options):
    same_in_batches(cluster(options), ask, SAMPLINGS[:3], [{"k": k} for k in (0, 2, 5, 8)])


@test
def test_speculation_copies_are_accepted_and_counted(options):
    c = cluster(options)
    before = c.metrics("decode-1")
    _, details = ask(c, COPY, {"k": 8}, temperature=0, max_tokens=64)
    assert accepted(details) >= 16, details
    after = c.metrics("decode-1")
    for result in ("accepted", "rejected"):
        series = f'tandem_decode_draft_tokens_total{{result="{result}"}}'
        assert after[series] - before[series] == details[f"{result}_prediction_tokens"]
        series = f'tandem_decode_drafter_tokens_total{{drafter="memo",result="{result}"}}'  # auto's
        assert after[series] - before[series] == details[f"{result}_prediction_tokens"]
    series = 'tandem_decode_drafter_steps_total{drafter="memo"}'
    assert 0 < after[series] - before[series] <= 63 - accepted(details)
    assert after["tandem_decode_memo_paths"] > 0
    c.wait_at_rest(["decode-1"], 20)


@test
def test_i1_a_step_is_one_event_of_a_stream(options):
    """Several tokens accepted in a step come together, with all that is said of each."""
    c = cluster(options)
    asked = {"max_tokens": 64, "temperature": 0, "logprobs": 2, "ignore_eos": True,
             "cache_salt": "events"}
    plain = c.complete(COPY, stream=True, speculation={"drafter": "none"}, **asked).collect()
    fast = c.complete(COPY, stream=True, speculation={"drafter": "prompt_lookup", "k": 8},
                      **asked).collect()
    assert fast.texts == plain.texts

    def logprobs(stream):
        lists = {}
        for event in stream.events:
            for choice in event["choices"]:
                for name, values in (choice["logprobs"] or {}).items():
                    lists.setdefault(name, []).extend(values)
        return lists

    assert logprobs(fast) == logprobs(plain)
    assert len(logprobs(fast)["tokens"]) == 64
    assert len(plain.events) >= 60 and len(fast.events) <= 40, (len(plain.events), len(fast.events))


@test
def test_lookahead_learns_from_rows_behind_wrong_drafts(options):
    """Free text that repeats nothing: what is accepted came from such rows, or from single pairs."""
    c = cluster(options)
    right = {}
    for drafter in ("prompt_lookup", "lookahead"):
        _, details = ask(c, FREE, {"drafter": drafter, "k": 6}, temperature=0, max_tokens=128)
        right[drafter] = accepted(details)
    assert right["lookahead"] > right["prompt_lookup"] + 5, right


@test
def test_i1_predicted_output_is_a_draft(options):
    c = cluster(options)
    expected, _ = ask(c, FREE, {"drafter": "none"}, temperature=0)
    text = expected[0][0][0]
    for content in (text, [{"type": "text", "text": text}], "Something else entirely."):
        got, details = ask(c, FREE, {"k": 8}, temperature=0,
                           prediction={"type": "content", "content": content})
        assert got == expected
        if content != "Something else entirely.":
            assert accepted(details) >= 30, details


@test
def test_i1_memo_remembers_hot_queries(options):
    """Asked again, an answer is drafted whole, also one that was sampled, in many requests at once."""
    c = cluster(options)
    for number, sampling in enumerate(SAMPLINGS):
        salt = f"hot {number}"
        for prompt in (FREE, COPY, "Hi"):  # "Hi": less than a block
            expected, _ = ask(c, prompt, {"drafter": "none"}, cache_salt=salt, **sampling)
            got, details = ask(c, prompt, {"drafter": "memo", "k": 8}, cache_salt=salt, **sampling)
            assert got == expected, (prompt, sampling)
            # 47 follow the first token, nine a step at most: 6 steps, each with a token of its own.
            assert accepted(details) == 41 and details["rejected_prediction_tokens"] == 0, \
                (prompt, sampling, details)
    wrong = []
    expected, _ = ask(c, FREE, {"drafter": "none"}, cache_salt="hot 1", **SAMPLINGS[1])

    def run(k):
        got, details = ask(c, FREE, {"drafter": "memo", "k": k}, cache_salt="hot 1", **SAMPLINGS[1])
        if got != expected or details["rejected_prediction_tokens"] > 0:
            wrong.append((k, details))

    run_together([(k,) for k in (0, 1, 2, 3, 5, 8, 8, 8)], run)
    assert not wrong, wrong


@test
def test_i1_memo_of_another_answer_changes_nothing(options):
    """The path that is remembered is of another seed: it is left where it is wrong."""
    c = cluster(options)
    for seed in range(20, 24):
        for choices in (1, 3):
            sampling = {"temperature": 0.9, "seed": seed, "n": choices}
            expected, _ = ask(c, FREE, {"drafter": "none"}, cache_salt="seeds", **sampling)
            ask(c, FREE, {"drafter": "none"}, cache_salt="seeds", temperature=0.9, seed=seed + 100)
            got, _ = ask(c, FREE, {"drafter": "memo", "k": 4}, cache_salt="seeds", **sampling)
            assert got == expected, sampling


@test
def test_i8_memo_shares_nothing_between_salts(options):
    c = cluster(options)
    _, lookup = ask(c, FREE, {"drafter": "prompt_lookup", "k": 8}, temperature=0, cache_salt="ours")
    _, ours = ask(c, FREE, {"drafter": "memo", "k": 8}, temperature=0, cache_salt="ours")
    _, theirs = ask(c, FREE, {"drafter": "memo", "k": 8}, temperature=0, cache_salt="theirs")
    assert accepted(ours) == 41 and ours["rejected_prediction_tokens"] == 0, ours
    assert theirs == lookup, (theirs, lookup)


@test
def test_i1_memo_is_shared_through_the_store(options):
    """What one decode node has answered another one drafts; not of another salt, and not from a store
    that keeps nothing."""
    kept = {}
    for memory in ("1M", "0"):
        with Cluster(options.bin, prefill=1, decode=2, router_args=["--allow-placement"],
                     kvstore_args=["--memo-memory", memory]) as c:
            def answer(node, salt):
                reply = c.complete(FREE, max_tokens=64, temperature=0.9, seed=3, logprobs=2,
                                   ignore_eos=True, cache_salt=salt,
                                   tandem={"prefill": "prefill-1", "decode": node},
                                   speculation={"drafter": "memo", "k": 8})
                return ([(each["text"], each["logprobs"]) for each in reply.choices],
                        accepted(reply.usage["completion_tokens_details"]))

            first, by_itself = answer("decode-1", "us")
            wait_until(lambda: memory == "0" or
                       c.metrics("kvstore-1")["tandem_kvstore_memo_answers"] == 1, 10,
                       "the store has the answer")
            again, kept[memory] = answer("decode-2", "us")
            assert again == first
            other, theirs = answer("decode-2", "them")
            assert other == first and theirs <= by_itself
            assert c.metrics("decode-2")["tandem_decode_memo_told_total"] == (memory != "0")
    assert kept["1M"] >= by_itself + 20 and kept["0"] <= by_itself, kept  # it may come a step late


@test
def test_memo_without_memory_is_prompt_lookup(options):
    with Cluster(options.bin, kvstore=0, decode_args=["--memo-memory", "0"]) as c:
        details = [c.complete(FREE, max_tokens=48, temperature=0, ignore_eos=True,
                              speculation={"drafter": drafter, "k": 8}).usage["completion_tokens_details"]
                   for drafter in ("memo", "memo", "prompt_lookup")]
        assert details[0] == details[1] == details[2], details


@test
def test_i4_speculation_publishes_verified_positions_only(options):
    """What a request with many wrong drafts leaves behind, another computes anew: the same bits."""
    c = cluster(options)
    for k in (0, 8):
        first, details = ask(c, COPY, {"k": k}, temperature=1.3, seed=21, max_tokens=120,
                             cache_salt=f"verified {k}")
        assert k == 0 or details["rejected_prediction_tokens"] > 0
        prompt = COPY + first[0][0][0]
        warm, _ = ask(c, prompt, {"drafter": "none"}, temperature=0, cache_salt=f"verified {k}")
        cold, _ = ask(c, prompt, {"drafter": "none"}, temperature=0, cache_salt=f"nobody {k}")
        assert warm == cold


@test
def test_i4_speculation_changes_no_prefix_hit(options):
    """A conversation's turns find as much of what was generated, whatever had drafted it."""
    c = cluster(options)
    hits = {}
    for drafter, k in (("none", 0), ("prompt_lookup", 8), ("memo", 3), ("lookahead", 8)):
        prompt = COPY
        hits[drafter] = []
        for _ in range(4):
            reply = c.complete(prompt, max_tokens=40, temperature=0.8, seed=5, ignore_eos=True,
                               cache_salt=f"turns {drafter}",
                               speculation={"drafter": drafter, "k": k})
            hits[drafter].append(reply.usage["prompt_tokens_details"]["cached_tokens"])
            c.wait_at_rest(["decode-1"], 20)
            prompt += reply.text + "\nGo on:"
    assert hits["none"][-1] > 160, hits
    assert all(each == hits["none"] for each in hits.values()), hits


@test
def test_speculation_wishes_are_checked(options):
    c = cluster(options)
    for wish, text in (({"drafter": "oracle"}, "oracle"), ({"k": 17}, "17"), ("fast", "object"),
                       ({"rule": "luck"}, "luck"), ({"rule": 1}, "string")):
        try:
            c.complete(FREE, max_tokens=4, speculation=wish)
            raise AssertionError(f"{wish} was taken")
        except HTTPError as refused:
            assert refused.status == 400 and text in refused.response.body.decode()


@test
def test_speculation_survives_giving_way(options):
    """Preempted with a drafter: comes back, and goes on drafting."""
    with Cluster(options.bin, kvstore=0, decode_args=["--kv-memory", str(22 * 368640)],
                 router_args=["--queue-ms", "60000"]) as c:
        for _ in range(24):  # outputs are short, it learns, and promises little
            c.complete(FREE, max_tokens=4, ignore_eos=True)
        alone = c.complete(COPY, max_tokens=150, temperature=0, ignore_eos=True,
                           speculation={"drafter": "none"}).text
        texts = []

        def run(k):
            texts.append(c.complete(COPY, max_tokens=150, temperature=0, ignore_eos=True,
                                    cache_salt=str(k), speculation={"k": k}).text)

        run_together([(k,) for k in (0, 3, 8, 8)], run)
        assert texts == [alone] * 4, texts
        assert c.metrics("decode-1")["tandem_decode_preemptions_total"] > 0
        c.wait_at_rest(["decode-1"], 20)


if __name__ == "__main__":
    main(__doc__)
