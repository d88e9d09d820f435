#!/usr/bin/env python3
"""Streams one chat answer from a cluster that deploy/local.sh started, and shows what it cost.

usage: deploy/demo.py CLUSTER_JSON
"""
import http.client
import json
import sys
import time

QUESTION = "Explain in three sentences why the sky is blue."
TIMEOUT_S = 120


def router_of(path):
    with open(path, encoding="utf-8") as file:
        return next(process["http"] for process in json.load(file) if process["role"] == "router")


def call(address, method, path, body=None):
    connection = http.client.HTTPConnection(address.replace("0.0.0.0", "127.0.0.1"),
                                            timeout=TIMEOUT_S)
    headers = {"Content-Type": "application/json"} if body is not None else {}
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    return connection.getresponse()


def events(response):
    """The data of server-sent events, up to [DONE]."""
    for line in response:
        line = line.decode("utf-8").rstrip("\r\n")
        if line.startswith("data: "):
            if line == "data: [DONE]":
                return
            yield json.loads(line[len("data: "):])
    raise RuntimeError("the stream ended without [DONE]")


def stream_answer(address, model):
    """Prints the answer as it comes; returns (headers, usage, times of the chunks with text)."""
    started = time.monotonic()
    response = call(address, "POST", "/v1/chat/completions", {
        "model": model, "stream": True, "stream_options": {"include_usage": True},
        "temperature": 0, "max_tokens": 120,
        "messages": [{"role": "user", "content": QUESTION}]})
    if response.status != 200:
        raise RuntimeError(f"HTTP {response.status}: {response.read().decode(errors='replace')}")
    usage, times = {}, []
    for event in events(response):
        if "error" in event:
            raise RuntimeError(event["error"].get("message", event["error"]))
        usage = event.get("usage") or usage
        for choice in event.get("choices", []):
            text = choice.get("delta", {}).get("content")
            if text:
                times.append(time.monotonic() - started)
                print(text, end="", flush=True)
    print()
    return response.headers, usage, times


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__.strip())
    address = router_of(sys.argv[1])
    model = json.loads(call(address, "GET", "/v1/models").read())["data"][0]["id"]
    print(f"\n{model} is asked: {QUESTION}\n")
    headers, usage, times = stream_answer(address, model)
    if not times:
        raise RuntimeError("the answer is empty")
    generated = usage.get("completion_tokens", len(times))
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    print(f"""
time to first token   {times[0] * 1000:.0f} ms""")
    if generated > 1 and times[-1] > times[0]:
        print(f"tokens per second     {(generated - 1) / (times[-1] - times[0]):.1f}")
    print(f"""prompt tokens         {usage.get('prompt_tokens', '?')}, of these cached {cached}
generated tokens      {generated}
prefill on            {headers.get('x-tandem-prefill', '?')}
decode on             {headers.get('x-tandem-decode', '?')}
""")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, RuntimeError, ValueError, KeyError, http.client.HTTPException) as error:
        print(f"\ndemo: error: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)
