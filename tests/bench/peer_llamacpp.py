#!/usr/bin/env python3
"""The figures of `tandem-bench model`, of llama.cpp: the same shapes, tokens, threads and repeats, through
the C API that llama-cpp-python binds. Prints one JSON object; progress goes to standard error.

usage: tests/bench/peer_llamacpp.py MODEL [--threads N] [--repeat N]
"""
import argparse
import json
import sys
import time

import llama_cpp as api

CHUNK = 512  # rows of one pass, as ours
PREFILL = (128, 512, 2048)
DECODE_CONTEXT = 128
DECODE_BATCHES = (1, 2, 4, 8, 16)
VERIFY_CONTEXT = 256
VERIFY_ROWS = (1, 2, 4, 6, 8)
STEPS = 8  # of a sample of decode and verify


@api.llama_log_callback
def say_nothing(*_):
    pass


class Peer:
    """A loaded model."""

    def __init__(self, path, threads):
        self.threads = threads
        api.llama_backend_init()
        api.llama_log_set(say_nothing, None)
        self.model = api.llama_model_load_from_file(path.encode(),
                                                    api.llama_model_default_params())
        if not self.model:
            sys.exit(f"llama.cpp cannot load {path}")
        self.vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))

    def context(self, tokens, sequences=1):
        return PeerContext(self, tokens, sequences)


class PeerContext:
    """A KV cache and the batches that fill it."""

    def __init__(self, peer, tokens, sequences):
        params = api.llama_context_default_params()
        params.n_ctx = tokens
        params.n_batch = params.n_ubatch = CHUNK
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = peer.threads
        params.kv_unified = True
        self.vocab = peer.vocab
        self.handle = api.llama_init_from_model(peer.model, params)
        if not self.handle:
            sys.exit("llama.cpp cannot make a context")
        self.memory = api.llama_get_memory(self.handle)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        api.llama_free(self.handle)

    def seconds_of_pass(self, rows):
        """rows: (sequence, position, whether logits are wanted)."""
        batch = api.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for i, (sequence, position, wanted) in enumerate(rows):
            batch.token[i] = ((position + sequence) * 7919 + 17) % self.vocab
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = wanted
        began = time.perf_counter()
        code = api.llama_decode(self.handle, batch)
        api.llama_synchronize(self.handle)
        ended = time.perf_counter()
        api.llama_batch_free(batch)
        if code != 0:
            sys.exit(f"llama_decode answers {code}")
        return ended - began

    def prefill(self, tokens, sequence=0):
        seconds = 0
        for begin in range(0, tokens, CHUNK):
            end = min(begin + CHUNK, tokens)
            seconds += self.seconds_of_pass([(sequence, position, position == tokens - 1)
                                             for position in range(begin, end)])
        return seconds

    def forget_from(self, position, sequence=-1):
        api.llama_memory_seq_rm(self.memory, sequence, position, -1)


def measure_prefill(peer, repeat):
    with peer.context(4096) as context:
        for tokens in PREFILL:
            best = float("inf")
            for _ in range(repeat):
                best = min(best, context.prefill(tokens))
                context.forget_from(0)
            yield f"prefill_{tokens}_tok_s", tokens / best


def measure_decode(peer, repeat):
    for batch in DECODE_BATCHES:
        with peer.context((DECODE_CONTEXT + STEPS) * batch + 256, batch) as context:
            for sequence in range(batch):
                context.prefill(DECODE_CONTEXT, sequence)
            best = float("inf")
            for _ in range(repeat):
                best = min(best, sum(
                    context.seconds_of_pass([(sequence, DECODE_CONTEXT + step, True)
                                             for sequence in range(batch)])
                    for step in range(STEPS)))
                context.forget_from(DECODE_CONTEXT)
            yield f"decode_b{batch}_tok_s", batch * STEPS / best


def measure_verify(peer, repeat):
    with peer.context(1024) as context:
        context.prefill(VERIFY_CONTEXT)
        for rows in VERIFY_ROWS:
            best = float("inf")
            for _ in range(repeat):
                seconds = 0
                for _ in range(STEPS):
                    seconds += context.seconds_of_pass([(0, VERIFY_CONTEXT + row, True)
                                                        for row in range(rows)])
                    context.forget_from(VERIFY_CONTEXT, 0)
                best = min(best, seconds)
            yield f"verify_{rows}_ms", best / STEPS * 1000


def resident_mb():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096 / 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    began = time.perf_counter()
    peer = Peer(args.model, args.threads)
    figures = {"load_ms": (time.perf_counter() - began) * 1000, "rss_mb": resident_mb()}
    for measure in (measure_prefill, measure_decode, measure_verify):
        for key, value in measure(peer, args.repeat):
            print(f"llama.cpp: {key} {value:.2f}", file=sys.stderr, flush=True)
            figures[key] = value
    print(json.dumps({key: round(value, 3) for key, value in figures.items()}))


if __name__ == "__main__":
    main()
