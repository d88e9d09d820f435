"""What the tests of speculation share: prompts, samplings, and an answer with all that must not depend
on it."""
import collections
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import run_together

TEXT = ("The harbour master wrote down every ship: the Anna, the Berta, the Clara and the Dora. "
        "The Anna carried salt. The Berta carried coal. The Clara carried wine. The Dora carried tea. ")
COPY = f"{TEXT}\nRepeat the text above, word for word:\n{TEXT[:60]}"
FREE = "Tell me a story about a lighthouse."
BASE_SAMPLINGS = [{"temperature": 0},
                  {"temperature": 0.8, "seed": 7},
                  {"temperature": 1.1, "seed": 8, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
                  {"temperature": 0, "repetition_penalty": 1.2, "frequency_penalty": 0.7,
                   "presence_penalty": 0.3}]


MODEL_SAMPLINGS = [*BASE_SAMPLINGS, {"temperature": 0.7, "seed": 9, "repetition_penalty": 1.1,
                                     "logit_bias": {"253": -5, "260": 2}}]
ENDINGS = [{"stop": ["coal", "wine"]}, {"stop": [" carried"], "min_tokens": 9},
           {"n": 3, "temperature": 0.9, "seed": 3}, {"ignore_eos": False, "max_tokens": 90},
           {"max_tokens": 1}, {"max_tokens": 2},
           {"stop": ["."], "include_stop_str_in_output": True}]


def ask(c, prompt, speculation, **more):
    """Whole answer of one request; everything that must not depend on speculation."""
    parameters = {"ignore_eos": True, "logprobs": 3, **more}
    reply = c.complete(prompt, speculation=speculation, **parameters)
    usage = dict(reply.usage)
    details = usage.pop("completion_tokens_details")
    return ([(choice["text"], choice["finish_reason"], choice["logprobs"])
             for choice in reply.choices], reply.json["tandem"]["logits_xxh"],
            usage["completion_tokens"]), details


def same_with_endings(c, ask_for, drafters):
    """Stop strings, choices, least and most tokens: the same answers with any of the drafters."""
    for ending in ENDINGS:
        more = {"temperature": 0.6, "seed": 5, **ending}
        expected, _ = ask_for(c, COPY, {"drafter": "none"}, **more)
        for drafter in drafters:
            for k in (1, 3, 8):
                got, _ = ask_for(c, COPY, {"drafter": drafter, "k": k}, **more)
                assert got == expected, (more, drafter, k, got, expected)


def same_in_batches(c, ask_for, samplings, wishes):
    """All at once, each as alone without drafts."""
    jobs = [(prompt, sampling) for prompt in (COPY, FREE) for sampling in samplings]
    expected = {(prompt, str(sampling)): ask_for(c, prompt, {"drafter": "none"}, **sampling)[0]
                for prompt, sampling in jobs}

    def run(prompt, sampling, wish):
        got, _ = ask_for(c, prompt, wish, **sampling)
        assert got == expected[(prompt, str(sampling))], (prompt[:20], sampling, wish)

    run_together([(*job, wish) for job in jobs for wish in wishes], run)


def wishes_of(drafters):
    """Of each some drafts a step, and as many as it plans itself."""
    return [wish for drafter in drafters
            for wish in ({"drafter": drafter, "k": 3}, {"drafter": drafter})]


def drafted(details):
    return details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"]


def sample(c, prompt, speculation, requests):
    """Texts of a few tokens, each with noise of its own."""
    texts = []

    def run(seed):
        reply = c.complete(prompt, max_tokens=4, n=8, temperature=2, top_k=4, seed=seed,
                           ignore_eos=True, speculation=speculation)
        usage = reply.usage["completion_tokens_details"]
        texts.append(([choice["text"] for choice in reply.choices],
                      usage["accepted_prediction_tokens"], usage["rejected_prediction_tokens"]))

    run_together([(seed,) for seed in range(requests)], run)
    return ([text for some, _, _ in texts for text in some], sum(a for _, a, _ in texts),
            sum(r for _, _, r in texts))


def far_apart(one, other):
    """Two-sample chi-square, in standard deviations (Wilson and Hilferty, 1931)."""
    counts = [collections.Counter(one), collections.Counter(other)]
    both = counts[0] + counts[1]
    kinds = [[text] for text, count in both.items() if count >= 16]
    kinds.append([text for text, count in both.items() if count < 16])
    chi2 = 0
    for texts in kinds:
        seen = [sum(count[text] for text in texts) for count in counts]
        for mine, side in zip(seen, (one, other)):
            want = sum(seen) * len(side) / (len(one) + len(other))
            chi2 += (mine - want) ** 2 / want if want > 0 else 0
    freedom = len(kinds) - 1
    assert freedom >= 4, both
    spread = 2 / (9 * freedom)
    return ((chi2 / freedom) ** (1 / 3) - (1 - spread)) / spread ** 0.5
