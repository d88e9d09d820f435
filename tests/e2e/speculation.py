"""What the tests of speculation share: prompts, samplings, and an answer with all that must not depend
on it."""
TEXT = ("The harbour master wrote down every ship: the Anna, the Berta, the Clara and the Dora. "
        "The Anna carried salt. The Berta carried coal. The Clara carried wine. The Dora carried tea. ")
COPY = f"{TEXT}\nRepeat the text above, word for word:\n{TEXT[:60]}"
FREE = "Tell me a story about a lighthouse."
BASE_SAMPLINGS = [{"temperature": 0},
                  {"temperature": 0.8, "seed": 7},
                  {"temperature": 1.1, "seed": 8, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
                  {"temperature": 0, "repetition_penalty": 1.2, "frequency_penalty": 0.7,
                   "presence_penalty": 0.3}]


def ask(c, prompt, speculation, **more):
    """Whole answer of one request; everything that must not depend on speculation."""
    parameters = {"ignore_eos": True, "logprobs": 3, **more}
    reply = c.complete(prompt, speculation=speculation, **parameters)
    usage = dict(reply.usage)
    details = usage.pop("completion_tokens_details")
    return ([(choice["text"], choice["finish_reason"], choice["logprobs"])
             for choice in reply.choices], reply.json["tandem"]["logits_xxh"],
            usage["completion_tokens"]), details
