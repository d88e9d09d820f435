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


def nothing_held(c):
    metrics = c.metrics("decode-1")
    return all(metrics[f'tandem_decode_kv_blocks{{state="{state}"}}'] == 0
               for state in ("active", "reserved", "quarantined"))


def expect_short_outputs(c):
    """Until the node promises a request little more than its prompt."""
    for _ in range(20):
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
        c.wait_until(lambda: nothing_held(c), 10, "every block given back")


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
        c.wait_until(lambda: nothing_held(c), 10, "every block given back")
        assert ask(c, 0).choices[0]["finish_reason"] == "length"


if __name__ == "__main__":
    main()
