#!/usr/bin/env python3
"""The official OpenAI SDK against a cluster, with and without asyncio."""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import client_venv  # noqa: E402

client_venv.enter(__file__)

import asyncio  # noqa: E402
import concurrent.futures  # noqa: E402
import tempfile  # noqa: E402

import openai  # noqa: E402

from cluster import Cluster, main, shared, test  # noqa: E402

HELLO = [{"role": "user", "content": "Name three colours."}]
PROMPT = "The capital of France is"
SHORT = {"max_tokens": 12, "temperature": 0}


def client_of(cluster, kind=openai.OpenAI, key="none"):
    return kind(base_url=f"{cluster.url}/v1", api_key=key, max_retries=0,
                timeout=cluster.http_timeout_s)


def setup(options):
    cluster = shared(options)
    return client_of(cluster), cluster.model


def joined(chunks, index=0):
    """Text of one choice of a stream's chunks, chat or completion."""
    parts = []
    for chunk in chunks:
        for choice in chunk.choices:
            if choice.index == index:
                parts.append(choice.text if hasattr(choice, "text") else choice.delta.content)
    return "".join(part or "" for part in parts)


def raises(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


@test
def openai_models_list(options):
    client, model = setup(options)
    models = client.models.list().data
    assert [m.id for m in models] == [model]
    assert models[0].object == "model"
    assert client.models.retrieve(model).id == model


@test
def openai_chat(options):
    client, model = setup(options)
    answer = client.chat.completions.create(model=model, messages=HELLO, **SHORT)
    assert answer.object == "chat.completion" and answer.model == model
    assert answer.id and answer.created > 0
    assert len(answer.choices) == 1 and answer.choices[0].index == 0
    message = answer.choices[0].message
    assert message.role == "assistant" and message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    usage = answer.usage
    assert usage.prompt_tokens > 0 and 0 < usage.completion_tokens <= 12
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@test
def openai_chat_stream_gives_the_same_text(options):
    client, model = setup(options)
    whole = client.chat.completions.create(model=model, messages=HELLO, **SHORT)
    chunks = list(client.chat.completions.create(model=model, messages=HELLO, stream=True, **SHORT))
    assert joined(chunks) == whole.choices[0].message.content
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    ends = [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason]
    assert ends == [whole.choices[0].finish_reason]
    assert all(chunk.usage is None for chunk in chunks)


@test
def openai_chat_stream_include_usage(options):
    client, model = setup(options)
    chunks = list(client.chat.completions.create(
        model=model, messages=HELLO, stream=True, stream_options={"include_usage": True}, **SHORT))
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])
    whole = client.chat.completions.create(model=model, messages=HELLO, **SHORT)
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


@test
def openai_completion(options):
    client, model = setup(options)
    answer = client.completions.create(model=model, prompt=PROMPT, **SHORT)
    assert answer.object == "text_completion" and answer.choices[0].text
    assert answer.usage.completion_tokens <= 12
    chunks = list(client.completions.create(model=model, prompt=PROMPT, stream=True, **SHORT))
    assert joined(chunks) == answer.choices[0].text


@test
def openai_completion_prompt_list(options):
    client, model = setup(options)
    prompts = [PROMPT, "One, two, three,"]
    answer = client.completions.create(model=model, prompt=prompts, **SHORT)
    assert [c.index for c in answer.choices] == [0, 1]
    for prompt, choice in zip(prompts, answer.choices):
        alone = client.completions.create(model=model, prompt=prompt, **SHORT)
        assert choice.text == alone.choices[0].text


@test
def openai_async_same_as_sync(options):
    client, model = setup(options)
    whole = client.chat.completions.create(model=model, messages=HELLO, **SHORT)
    text = client.completions.create(model=model, prompt=PROMPT, **SHORT).choices[0].text

    async def stream(aclient):
        chunks = []
        async for chunk in await aclient.chat.completions.create(
                model=model, messages=HELLO, stream=True, **SHORT):
            chunks.append(chunk)
        return joined(chunks)

    async def everything():
        async with client_of(shared(options), openai.AsyncOpenAI) as aclient:
            return await asyncio.gather(
                aclient.chat.completions.create(model=model, messages=HELLO, **SHORT),
                aclient.completions.create(model=model, prompt=PROMPT, **SHORT),
                *(stream(aclient) for _ in range(4)))

    chat, completion, *streams = asyncio.run(everything())
    assert chat.choices[0].message.content == whole.choices[0].message.content
    assert completion.choices[0].text == text
    assert streams == [whole.choices[0].message.content] * 4


@test
def openai_n(options):
    client, model = setup(options)
    wish = {"model": model, "messages": HELLO, "n": 2, "seed": 11, "temperature": 1.0,
            "max_tokens": 16}
    answer = client.chat.completions.create(**wish)
    assert [c.index for c in answer.choices] == [0, 1]
    texts = [c.message.content for c in answer.choices]
    assert texts[0] != texts[1]
    chunks = list(client.chat.completions.create(stream=True, **wish))
    assert [joined(chunks, 0), joined(chunks, 1)] == texts
    assert answer.usage.completion_tokens > 16 or "stop" in [c.finish_reason for c in answer.choices]


@test
def openai_logprobs(options):
    client, model = setup(options)
    answer = client.chat.completions.create(model=model, messages=HELLO, logprobs=True,
                                            top_logprobs=3, **SHORT)
    content = answer.choices[0].logprobs.content
    assert len(content) >= answer.usage.completion_tokens - 1 > 0
    for entry in content:
        assert entry.logprob <= 0 and len(entry.top_logprobs) == 3
        # Greedy: the token taken is the likeliest.
        assert entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
    spoken = b"".join(bytes(entry.bytes) for entry in content).decode("utf-8", "replace")
    assert spoken.startswith(answer.choices[0].message.content[:8])
    old = client.completions.create(model=model, prompt=PROMPT, logprobs=2, **SHORT).choices[0]
    assert len(old.logprobs.tokens) == len(old.logprobs.token_logprobs)
    assert "".join(old.logprobs.tokens).startswith(old.text[:8])
    assert all(len(top) >= 2 for top in old.logprobs.top_logprobs)


@test
def openai_stop(options):
    client, model = setup(options)
    free = client.completions.create(model=model, prompt="1, 2, 3, 4,", max_tokens=24,
                                     temperature=0).choices[0].text
    stop = free[4:7]
    assert len(stop) == 3
    answer = client.completions.create(model=model, prompt="1, 2, 3, 4,", max_tokens=24,
                                       temperature=0, stop=[stop])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == free[:free.index(stop)]


@test
def openai_seed_reproduces(options):
    client, model = setup(options)

    def text(seed):
        return client.chat.completions.create(
            model=model, messages=HELLO, seed=seed, temperature=1.2, max_tokens=24
        ).choices[0].message.content

    assert text(5) == text(5)
    assert text(5) != text(6)


@test
def openai_max_tokens(options):
    client, model = setup(options)
    for limit in (1, 2, 7):
        answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=limit,
                                           temperature=0)
        assert answer.usage.completion_tokens == limit
        assert answer.choices[0].finish_reason == "length"
    answer = client.chat.completions.create(model=model, messages=HELLO, max_completion_tokens=2,
                                            temperature=0)
    assert answer.usage.completion_tokens == 2


@test
def openai_bad_request(options):
    client, model = setup(options)
    error = raises(openai.BadRequestError, lambda: client.chat.completions.create(
        model=model, messages=HELLO, temperature=-1))
    assert error.status_code == 400 and error.param == "temperature" and error.message
    raises(openai.BadRequestError, lambda: client.chat.completions.create(model=model, messages=[]))
    raises(openai.BadRequestError, lambda: client.completions.create(
        model=model, prompt=PROMPT, max_tokens=-1))


@test
def openai_unknown_model(options):
    client, _ = setup(options)
    error = raises(openai.NotFoundError, lambda: client.chat.completions.create(
        model="no-such-model", messages=HELLO))
    assert error.code == "model_not_found"


@test
def openai_rate_limit(options):
    # Memory for one request, a queue of one: of eight at a time some are told to come back.
    with Cluster(options.bin, kvstore=0, decode_args=["--kv-memory", "6M"],
                 router_args=["--queue-max", "1"]) as cluster:
        client = client_of(cluster)

        def ask(_):
            try:
                return client.completions.create(model=cluster.model, prompt=PROMPT,
                                                 max_tokens=100, temperature=0)
            except openai.RateLimitError as error:
                return error

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(ask, range(8)))
        refused = [a for a in answers if isinstance(a, openai.RateLimitError)]
        served = [a for a in answers if not isinstance(a, openai.RateLimitError)]
        assert refused and served, f"{len(refused)} refused, {len(served)} served"
        assert all(int(error.response.headers["retry-after"]) > 0 for error in refused)
        assert len({a.choices[0].text for a in served}) == 1


@test
def openai_authentication(options):
    with tempfile.NamedTemporaryFile("w", suffix=".keys") as keys:  # mode 0600
        keys.write("sk-first\nsk-second\n")
        keys.flush()
        with Cluster(options.bin, kvstore=0, router_args=["--api-key-file", keys.name]) as cluster:
            good = client_of(cluster, key="sk-second")
            model = good.models.list().data[0].id
            assert good.completions.create(model=model, prompt=PROMPT, **SHORT).choices[0].text
            error = raises(openai.AuthenticationError, lambda: client_of(
                cluster, key="sk-wrong").completions.create(model=model, prompt=PROMPT, **SHORT))
            assert error.status_code == 401


if __name__ == "__main__":
    main(__doc__)
