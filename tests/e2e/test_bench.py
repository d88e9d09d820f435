"""tandem-bench: its figures have the promised names and agree with what the servers counted. Never how
fast anything was."""
import glob
import http.client
import json
import os
import re
import socketserver
import struct
import subprocess
import sys
import tempfile
import threading

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import REPORT, ROOT, Cluster, main, test, wait_until

MODEL = os.path.join(ROOT, "build/models/SmolLM2-135M-Instruct.Q4_1.gguf")

SERVE_KEYS = """requests errors requests_s tok_s ttft_ms_p50 ttft_ms_p90 ttft_ms_p99 tbt_ms_p50
    tbt_ms_p90 e2e_ms_p50 e2e_ms_p90 prompt_tokens completion_tokens prompt_tok_s wall_s""".split()


def bench(options, *args, code=0, env=None):
    """Runs tandem-bench; returns (figures or None, standard error)."""
    command = [os.path.join(options.bin, "tandem-bench"), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500,
                          env={**os.environ, "UCX_MEM_EVENTS": "n", **(env or {})})
    assert done.returncode == code, f"{args}: exit code {done.returncode}\n{done.stderr[-3000:]}"
    assert not REPORT.search(done.stderr), done.stderr
    return json.loads(done.stdout) if "--json" in args and done.stdout else None, done.stderr


def check_figures(figures, keys):
    missing = [key for key in keys if key not in figures]
    assert not missing, f"missing: {missing} in {figures}"
    for key, value in figures.items():
        assert isinstance(value, (int, float)) and value == value, f"{key} is {value}"
        assert value > 0 or key in ("errors", "cached_tokens", "cached_fraction", "added_ms_p50"), \
            f"{key} is {value}"


# --- serve against a cluster ----------------------------------------------------------------------

def router_counts(cluster):
    m = cluster.metrics()
    return {"requests": m['tandem_router_requests_total{outcome="ok"}'],
            "prompt_tokens": m["tandem_router_prompt_tokens_total"],
            "completion_tokens": m["tandem_router_completion_tokens_total"],
            "cached_tokens": m["tandem_router_cached_tokens_total"]}


def check_against_router(before, after, figures):
    for name, value in before.items():
        assert after[name] - value == figures[name], \
            f"{name}: {figures[name]}, and the router counted {after[name] - value}"


@test
def test_serve_agrees_with_the_router(options):
    size = ["--system-tokens", 40, "--prompt-tokens", 30, "--new-tokens", 10, "--max-tokens", 8]
    with Cluster(options.bin) as c:
        before = router_counts(c)
        figures, _ = bench(options, "serve", "--url", c.url, "--sessions", 3, "--turns", 3, *size,
                           "--json")
        check_figures(figures, SERVE_KEYS + ["cached_fraction"])
        assert (figures["requests"], figures["errors"]) == (9, 0)
        assert figures["cached_tokens"] > 0  # a turn finds the ones before it
        check_against_router(before, router_counts(c), figures)

        before = router_counts(c)
        figures, _ = bench(options, "serve", "--url", c.url + "/v1", "--sessions", 2, "--turns", 2,
                           "--rate", 50, "--seed", 2, "--ignore-eos", *size, "--json")
        assert (figures["requests"], figures["errors"]) == (4, 0)
        assert figures["completion_tokens"] == 4 * 8
        check_against_router(before, router_counts(c), figures)

        before = router_counts(c)["requests"]
        figures, _ = bench(options, "serve", "--url", c.url, "--direct", c.url, "--sessions", 1,
                           "--turns", 2, "--seed", 3, "--model", c.model, *size, "--json")
        check_figures(figures, SERVE_KEYS + ["added_ms_p50"])
        assert figures["requests"] == 2 and router_counts(c)["requests"] - before == 4

        figures, progress = bench(options, "serve", "--url", c.url, "--sessions", 2, "--seconds", 2,
                                  "--seed", 4, *size, "--json")
        assert figures["errors"] == 0 and figures["requests"] >= 2
        assert re.search(r"\d+ answers, 0 errors, \d+ under way", progress)


# --- serve against servers that answer nonsense ---------------------------------------------------

def event(text):
    return b'data: {"choices":[{"index":0,"delta":{"content":"%s"}}]}\n\n' % text


USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":%s}}\n\n'
GOOD = event(b"good ") + event(b"day") + USAGE % b"2" + b"data: [DONE]\n\n"


def reply(body, status=b"200 OK", length=None):
    return (b"HTTP/1.1 %s\r\nConnection: close\r\nContent-Type: text/event-stream\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (status, length or len(body), body))


# What the server sends, and what is said about it.
NONSENSE = [
    (b"", "empty reply"),
    (b"\x00\xff\x16garbage without any sense\r\n\r\n" * 9, "HTTP/0.9"),
    (reply(b"it broke\n", b"500 Internal Server Error"), "HTTP 500: it broke"),
    (reply(b'{"error":{"message":"out of \\u001b[31mluck"}}', b"500 Oh"), "HTTP 500: out of ?[31mluck"),
    (reply(b'{"error":"slow down"}', b"429 Too Many Requests"), "HTTP 429: slow down"),
    (reply(b"<html>" * 99), "not an event stream: <html>"),
    (reply(event(b"half")), "without [DONE]"),
    (reply(event(b"half"), length=9999), "bytes remaining to read"),
    (reply(b"data: {\"choices\":[{]}\n\n"), "not a JSON object"),
    (reply(b"data: [1,2]\n\n"), "not a JSON object"),
    (reply(b"data: " + b"[" * 5000 + b"\n\n"), "not a JSON object"),
    (reply(b"data: \"\xff\xfe\x00\"\n\n"), "not a JSON object"),
    (reply(b"data: " + b"x" * 300000), "longer than 262144 bytes"),
    (reply(event(b"x" * 200000) * 6), "longer than 1048576 bytes"),
    (reply(event(b"a") + USAGE % b"-5" + b"data: [DONE]\n\n"), "no count of tokens"),
    (reply(event(b"a") + USAGE % b"99999999999" + b"data: [DONE]\n\n"), "no count of tokens"),
    (reply(event(b"a") + USAGE % b"{}" + b"data: [DONE]\n\n"), "no count of tokens"),
    (reply(event(b"a") + b'data: {"error":{"message":"node lost"}}\n\n'), "node lost"),
    (reply(b'data: {"choices":{"delta":7},"usage":[]}\n\ndata: [DONE]\n\n'), "neither text nor"),
    (reply(b"data: [DONE]\n\n"), "neither text nor"),
]


class Nonsense(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Answers request number i with answers[i], and keeps the bodies it was sent."""
    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, answers):
        self.answers = list(answers)
        self.bodies = []
        super().__init__(("127.0.0.1", 0), NonsenseHandler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request, client_address):
        pass  # clients that had enough

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class NonsenseHandler(socketserver.StreamRequestHandler):
    def handle(self):
        self.rfile.readline()
        headers = http.client.parse_headers(self.rfile)
        self.server.bodies.append(self.rfile.read(int(headers["Content-Length"] or 0)))
        self.wfile.write(self.server.answers[len(self.server.bodies) - 1])


@test
def test_serve_counts_nonsense_as_errors(options):
    with Nonsense([answer for answer, _ in NONSENSE] + [reply(GOOD)] * 2) as server:
        figures, said = bench(options, "serve", "--url", server.url, "--model", "m", "--sessions", 1,
                              "--turns", len(NONSENSE) + 2, "--json", code=1)
        assert figures["errors"] == len(NONSENSE), figures
        assert figures["requests"] == 2 and figures["completion_tokens"] == 4
        assert figures["prompt_tokens"] == 18 and "cached_fraction" not in figures
        assert said.count("a request failed: ") == 8  # texts that are new, up to a limit
        roles = [message["role"] for message in json.loads(server.bodies[-1])["messages"]]
        assert roles == ["system", "user", "assistant", "user"]  # what failed left the history
        assert json.loads(server.bodies[-1])["messages"][2]["content"] == "good day"


@test
def test_serve_says_what_was_wrong(options):
    for answer, text in NONSENSE:
        with Nonsense([answer] * 2) as server:
            _, said = bench(options, "serve", "--url", server.url, "--model", "m", "--sessions", 1,
                            "--turns", 1, "--json", code=1)
            line = [line for line in said.splitlines() if "a request failed: " in line]
            assert len(line) == 1 and text.lower() in line[0].lower(), f"{text}: {said}"
            assert line[0].isprintable()


@test
def test_serve_without_a_server_says_so(options):
    with Nonsense([]) as server:
        url = server.url  # of a server that is gone
    _, said = bench(options, "serve", "--url", url, "--json", code=1)
    assert "does not name a model" in said
    figures, said = bench(options, "serve", "--url", url, "--model", "m", "--sessions", 2, "--turns", 1,
                          "--json", code=1)
    assert (figures["requests"], figures["errors"]) == (0, 2) and "connect" in said


# --- model ----------------------------------------------------------------------------------------

MODEL_KEYS = """load_ms rss_mb prefill_128_tok_s prefill_512_tok_s prefill_2048_tok_s decode_b1_tok_s
    decode_b2_tok_s decode_b4_tok_s decode_b8_tok_s decode_b16_tok_s verify_1_ms verify_2_ms verify_4_ms
    verify_6_ms verify_8_ms attention_gmac_s read_limit_gb_s read_fraction""".split()


def write_tiny_model(path, layers=2, dim=32, ff=64, heads=2, vocab=64):
    """A sound Llama model of F32 zeros and ones, which says nothing sensible."""
    def text(value):
        return struct.pack("<Q", len(value)) + value.encode()

    def pair(key, kind, form, value):
        return text(key) + struct.pack("<I" + form, kind, value)

    numbers = [("block_count", layers), ("context_length", 2048), ("embedding_length", dim),
               ("feed_forward_length", ff), ("attention.head_count", heads),
               ("attention.head_count_kv", heads), ("rope.dimension_count", dim // heads)]
    metadata = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    metadata += b"".join(pair("llama." + key, 4, "I", value) for key, value in numbers)
    metadata += pair("llama.attention.layer_norm_rms_epsilon", 6, "f", 1e-5)
    metadata += pair("llama.rope.freq_base", 6, "f", 1e4)
    parts = [("attn_norm", dim), ("attn_q", dim, dim), ("attn_k", dim, dim), ("attn_v", dim, dim),
             ("attn_output", dim, dim), ("ffn_norm", dim), ("ffn_gate", dim, ff), ("ffn_up", dim, ff),
             ("ffn_down", ff, dim)]
    tensors = [("token_embd.weight", dim, vocab), ("output_norm.weight", dim)]
    tensors += [(f"blk.{layer}.{name}.weight", *shape) for layer in range(layers)
                for name, *shape in parts]
    described, data = b"", b""
    for name, *shape in tensors:
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        described += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, len(data))
        data += struct.pack(f"<{count}f", *(i % 3 / 4 for i in range(count)))  # multiples of 32 bytes
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(numbers) + 3) + metadata + described
    with open(path, "wb") as file:
        file.write(head + bytes(-len(head) % 32) + data)


@test
def test_model_has_all_figures(options):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "tiny.gguf")
        write_tiny_model(path)
        for isa in ("auto", "portable"):
            figures, _ = bench(options, "model", "--model", path, "--repeat", 1, "--isa", isa,
                               "--threads", 2, "--json")
            check_figures(figures, MODEL_KEYS)


# --- transfer -------------------------------------------------------------------------------------

TRANSFER_KEYS = ["fetch_gb_s", "fetch_lat_us", "copy_gb_s"]


@test
def test_transfer_has_all_figures_of_each_carrier(options):
    size = ["--size", 4096, "--blocks", 40, "--repeat", 2, "--json"]
    for carrier in ("auto", "tcp", "shm"):
        figures, _ = bench(options, "transfer", "--carrier", carrier, *size)
        assert list(figures) == TRANSFER_KEYS
        check_figures(figures, TRANSFER_KEYS)
    figures, said = bench(options, "transfer", "--carrier", "shm,tcp", *size)
    assert list(figures) == [f"{c}_{key}" for c in ("shm", "tcp") for key in TRANSFER_KEYS]
    assert "carrier=shm" in said and "carrier=tcp" in said


# --- kv -------------------------------------------------------------------------------------------

@test
def test_kv_has_all_figures_and_never_allocates(options):
    figures, _ = bench(options, "kv", "--blocks", 4096, "--repeat", 2, "--json")
    assert list(figures) == ["match_us", "insert_us", "evict_us", "bytes_per_block", "step_ns",
                             "allocs_per_step"]
    assert figures["allocs_per_step"] == 0
    check_figures({**figures, "allocs_per_step": 1}, list(figures))


# --- router ---------------------------------------------------------------------------------------

@test
def test_router_has_all_figures(options):
    keys = ["match_us", "place_us_p50", "place_us_p99", "event_blocks_s", "index_mb"]
    figures, _ = bench(options, "router", "--nodes", 40, "--blocks", 20000, "--repeat", 2, "--json")
    assert list(figures) == keys
    check_figures(figures, keys)


# --- store ----------------------------------------------------------------------------------------

@test
def test_store_puts_reads_and_looks_up_by_each_carrier(options):
    keys = ["put_gb_s", "get_gb_s", "put_ops_s", "get_ops_s", "lookup_keys_s", "recovery_100k_s"]
    for carrier in ("shm", "tcp"):
        figures, said = bench(options, "store", "--carrier", carrier, "--size", 4096, "--blocks", 40,
                              "--repeat", 6, "--json")  # more rounds than the store has room for
        assert list(figures) == keys
        check_figures(figures, keys)
        assert f"carrier={carrier}" in said


@test
def test_hot_prefixes_take_load_off_the_busiest_segment(options):
    figures, _ = bench(options, "hot", "--model", MODEL, "--local-sh", os.path.join(ROOT, "deploy/local.sh"),
                       "--prefixes", 4, "--zipf", 200, "--seconds", 2, "--json")
    # One prefix is read in most cases: alone on its segment, then on three of four.
    assert figures["busiest_share_one"] > 0.6, figures
    assert figures["busiest_share_hot"] < 0.8 * figures["busiest_share_one"], figures
    assert figures["hot_replicas"] > 0, figures


# --- handoff --------------------------------------------------------------------------------------

@test
def test_handoff_has_all_figures_and_leaves_nothing(options):
    with tempfile.TemporaryDirectory() as folder:
        figures, _ = bench(options, "handoff", "--model", MODEL, "--tokens", 40, "--cached-tokens", 64,
                           "--turn-tokens", 8, "--repeat", 1, "--local-sh",
                           os.path.join(ROOT, "deploy/local.sh"), "--json", env={"TMPDIR": folder})
        check_figures(figures, """one_process_ttft_ms shm_split_ttft_ms shm_split_ttft_ratio
            tcp_split_ttft_ms tcp_split_ttft_ratio cached_ttft_ms cached_ttft_ratio
            chat_turn_ttft_ms_p50""".split())
        assert os.listdir(folder) == []


@test
def test_a_killed_handoff_leaves_no_cluster(options):
    def pids():
        found = []
        for run in glob.glob(f"{folder}/*/run/cluster.json"):
            with open(run, encoding="utf-8") as file:
                found += [process["pid"] for process in json.load(file)]
        return found

    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [os.path.join(options.bin, "tandem-bench"), "handoff", "--model", MODEL, "--carrier", "shm",
             "--local-sh", os.path.join(ROOT, "deploy/local.sh")], stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "TMPDIR": folder})
        try:
            wait_until(pids, 60, "the first process of a cluster")
        finally:
            process.kill()
            process.wait()
        wait_until(lambda: os.listdir(folder) == [], 300, "the keeper has ended its cluster")


# --- spec -----------------------------------------------------------------------------------------

@test
def test_spec_has_a_row_for_each_cell(options):
    drafters = ["none", "prompt_lookup", "auto"]
    figures, progress = bench(options, "spec", "--model", MODEL, "--tokens", 24, "--repeat", 1,
                              "--kinds", "copy,hot", "--batches", "1,3", "--drafters",
                              ",".join(drafters[1:]), "--local-sh",
                              os.path.join(ROOT, "deploy/local.sh"), "--json")
    assert list(figures) == ["rows"]
    assert [(row["kind"], row["batch"], row["drafter"]) for row in figures["rows"]] == \
        [(kind, batch, drafter) for kind in ("copy", "hot") for batch in (1, 3) for drafter in drafters]
    for row in figures["rows"]:
        assert list(row) == ["kind", "drafter", "batch", "tok_s", "ratio", "acceptance",
                             "mean_accepted"]
        assert row["tok_s"] > 0 and row["ratio"] > 0, row
        assert 0 <= row["acceptance"] <= 1, row
        if row["drafter"] == "none":
            assert (row["ratio"], row["acceptance"], row["mean_accepted"]) == (1, 0, 0), row
        elif row["kind"] == "copy":
            assert row["acceptance"] > 0 and row["mean_accepted"] > 0, row
    assert "round 1/1: copy, batch 1:" in progress and "auto: at worst" in progress


# --- the router alone -----------------------------------------------------------------------------

@test
def test_load_counts_what_a_back_end_answers(options):
    command = [os.path.join(options.bin, "tandem-bench"), "instant", "--tokens", "4"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = server.stdout.readline().strip()
            for more in ((), ("--stream",)):
                figures, _ = bench(options, "load", "--url", url, "--connections", 8, "--requests", 100,
                                   *more, "--json")
                assert figures["requests"] == 100 and figures["errors"] == 0, figures
                assert 0 < figures["first_byte_ms_p50"] <= figures["e2e_ms_p50"], figures
        finally:
            server.terminate()
        assert server.wait() == 0
    _, said = bench(options, "load", "--url", url, "--requests", 1, code=1)
    assert "a request failed: the connection was closed" in said, said


# --- options --------------------------------------------------------------------------------------

@test
def test_bad_options_get_one_clear_line(options):
    for args in (["serve"], ["serve", "--url", "ftp://x"], ["serve", "--url", "http://x", "more"],
                 ["serve", "--url", "http://x", "--sessions", "0"],
                 ["serve", "--url", "http://x", "--turns", "many"],
                 ["serve", "--url", "http://x", "--rate", "nan"],
                 ["serve", "--url", "http://x", "--rate", "1e-9"],
                 ["serve", "--url", "http://x", "--rate", "2", "--direct", "http://y"],
                 ["model"], ["model", "--model", "x", "--isa", "sse"],
                 ["model", "--model", "x", "--repeat", "0"],
                 ["handoff"], ["handoff", "--model", "x", "--carrier", "rdma"],
                 ["handoff", "--model", "x", "--local-sh", "nowhere"],
                 ["load"], ["load", "--url", "http://x", "--connections", "0"],
                 ["mock"], ["mock", "--router", "tcp://x"],
                 ["mock", "--router", "x", "--model", "x", "--prefill", "4000", "--decode", "100"],
                 ["instant", "--port", "70000"],
                 ["kv", "--blocks", "1023"], ["kv", "more"],
                 ["router", "--nodes", "1"], ["router", "--blocks", "255"],
                 ["store", "--carrier", "ib"], ["store", "--batch", "0"],
                 ["spec"], ["spec", "--model", "x", "--kinds", "song"],
                 ["spec", "--model", "x", "--drafters", "oracle"],
                 ["spec", "--model", "x", "--batches", "0"],
                 ["spec", "--model", "x", "--batches", "1,2,3,4,5,6,7,8,9"],
                 ["transfer", "--carrier", "ib"], ["transfer", "--carrier", ","],
                 ["transfer", "--size", "1000000000", "--blocks", "60000"]):
        _, said = bench(options, *args, code=2)
        assert len(said.splitlines()) == 1 and said.startswith("tandem-bench: "), f"{args}: {said}"


if __name__ == "__main__":
    main()
