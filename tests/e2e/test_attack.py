"""What a cluster does with garbage, floods, clients that misbehave, and processes that stop and come back.

Whatever is thrown at it, afterwards the same request gets the same answer, every process is the one that
started, and no block is held."""
import concurrent.futures
import http.client
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import ROOT, Cluster, main, test, wait_until

HELD = ("reserved", "active", "quarantined")
PROMPT = "The lighthouse keeper wrote down what the sea had brought that day: " * 4
TOKENS = 8


# --- looking at a cluster -------------------------------------------------------------------------

def ask(c, **parameters):
    return c.complete(PROMPT, temperature=0, ignore_eos=True, max_tokens=TOKENS, **parameters)


def held_blocks(c):
    held = {}
    for node in c.ids():
        for series, value in (c.metrics(node).items() if node != "router" else ()):
            if "_kv_blocks{" in series and any(f'"{state}"' in series for state in HELD) and value:
                held[f"{node} {series}"] = value
    return held


def is_ready(c):
    try:
        return c.request("GET", "/ready", timeout_s=5).status == 200
    except (OSError, http.client.HTTPException):
        return False


def check_sound(c, expected):
    for process_id in c.ids():
        assert c.alive(process_id), f"{process_id} has fallen"
    wait_until(lambda: is_ready(c), 30, "ready")
    assert ask(c).text == expected
    wait_until(lambda: not held_blocks(c), 30, f"no block is held: {held_blocks(c)}")
    series = c.metrics()
    assert series["tandem_router_requests_running"] == 0, series


def listening_ports(pid):
    """TCP ports that a process listens on: its bus, its HTTP, and UCX's."""
    own = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            own.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except FileNotFoundError:
            continue
    ports = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/{pid}/net/{table}", encoding="utf-8") as file:
            for line in list(file)[1:]:
                words = line.split()
                if words[3] == "0A" and f"socket:[{words[9]}]" in own:
                    ports.add(int(words[1].rsplit(":", 1)[1], 16))
    return sorted(ports)


# --- raw connections ------------------------------------------------------------------------------

def connect(port, timeout_s=20):
    return socket.create_connection(("127.0.0.1", port), timeout=timeout_s)


def throw(port, *pieces, reset=False):
    """Sends pieces, reads nothing, goes away: politely or with a reset."""
    try:
        with connect(port) as s:
            for piece in pieces:
                s.sendall(piece)
            if reset:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    except OSError:
        pass  # closed on us, which is an answer too


def frame(body, more=False, command=False):
    flags = (1 if more else 0) | (4 if command else 0)
    if len(body) > 255:
        return struct.pack(">BQ", flags | 2, len(body)) + body
    return bytes((flags, len(body))) + body


ZMTP_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
ZMTP_READY = frame(b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER", command=True)
# An envelope: version 1, sender "prefill-1", incarnations and sequence that nobody has, then a body.
ENVELOPE = (b"\x08\x01\x12\x09prefill-1" + b"\x19" + b"\x07" * 8 + b"\x21" + b"\x09" * 8 +
            b"\x29" + b"\xff" * 8)


def field(number, body):
    """A length-delimited protobuf field of less than 2^14 bytes."""
    tag, size = number << 3 | 2, len(body)
    return (bytes((tag & 127 | 128, tag >> 7)) if tag > 127 else bytes((tag,))) + \
        (bytes((size & 127 | 128, size >> 7)) if size > 127 else bytes((size,))) + body


BODY_NUMBERS = (*range(10, 15), *range(20, 30), *range(40, 47))


@test
def test_garbage_on_every_port(options):
    noise = bytes((i * 7919 + i // 251) & 255 for i in range(1 << 16))
    envelopes = [frame(ENVELOPE + field(number, body)) for number in BODY_NUMBERS
                 for body in (b"", b"\xff" * 40, b"\x09" + b"\xff" * 8 + b"\x10\xff\xff\xff\xff\x0f",
                              b"\x0a\x02\x08\x01" * 600)]
    hello = ZMTP_GREETING + ZMTP_READY
    volleys = [
        (b"",), (noise[:1],), (noise,), (bytes(1 << 16),), (b"\xff" * (1 << 16),),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: ",), (b"GET /metrics HTTP/1.1\r\n\r\n" * 50,),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 18446744073709551615\r\n\r\n{",),
        (ZMTP_GREETING[:11],), (ZMTP_GREETING,), (hello[:-3],), (hello, noise),
        (ZMTP_GREETING, frame(b"\x05READY" + b"\xff" * 40, command=True)),
        (hello, b"\x02\x7f\xff\xff\xff\xff\xff\xff\xff"),  # a frame of 2^63 bytes
        (hello, frame(noise, more=True) * 8),  # never its last frame
        (hello, frame(b"", more=True) * 2000 + frame(b"x")),
        (hello, frame(noise) * 4 + b"".join(envelopes)),
        (hello, b"".join(frame(ENVELOPE[:i]) for i in range(len(ENVELOPE)))),
    ]
    with Cluster(options.bin, kv_memory="256M") as c:
        expected = ask(c).text
        for process_id, pid in c.pids().items():
            ports = listening_ports(pid)
            assert len(ports) >= 2, (process_id, ports)
            for port in ports:
                for number, volley in enumerate(volleys):
                    throw(port, *volley, reset=number % 2 == 1)
        check_sound(c, expected)
        wait_until(lambda: c.metrics()["tandem_router_bus_refused"] > 0, 5, "junk is counted")


@test
def test_i6_junk_at_full_speed_starves_nobody(options):
    """Heartbeats go on while somebody sends junk as fast as the wire takes it."""
    with Cluster(options.bin, kv_memory="256M", kvstore=0) as c:
        expected = ask(c).text
        stop = threading.Event()

        def flood(port):
            while not stop.is_set():
                try:
                    with connect(port) as s:
                        s.sendall(ZMTP_GREETING + ZMTP_READY)
                        while not stop.is_set():
                            s.sendall(frame(b"junk") * 5000)
                except OSError:
                    pass  # we answer no heartbeats, so it hangs up now and then

        threads = []
        for process_id in c.ids():
            with open(os.path.join(c.run_dir, f"{process_id}.ready"), encoding="utf-8") as file:
                port = int(file.read().split()[1].rsplit(":", 1)[1])
            threads.append(threading.Thread(target=flood, args=(port,), daemon=True))
            threads[-1].start()
        until = time.monotonic() + 4
        while time.monotonic() < until:
            assert ask(c).text == expected
        stop.set()
        for thread in threads:
            thread.join()
        assert c.metrics()["tandem_router_node_deaths_total"] == 0
        for process_id in c.ids():
            assert len(c.log(process_id)) < 100_000, "junk does not fill the log"
        check_sound(c, expected)


def talk(port, request, timeout_s=3):
    """Everything that comes back until the server closes or falls silent for a moment."""
    got = b""
    with connect(port, timeout_s) as s:
        try:
            s.sendall(request)
            while chunk := s.recv(65536):
                got += chunk
        except OSError:
            pass
    return got


def post(path, body, *headers):
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Connection: close", *headers]
    if not any(h.lower().startswith(("content-length", "transfer-encoding")) for h in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


@test
def test_odd_http_requests_get_an_error_or_no_answer(options):
    with Cluster(options.bin, kv_memory="256M", kvstore=0,
                 router_args=["--body-bytes-max", "1M"]) as c:
        expected = ask(c).text
        port = int(c.address.rsplit(":", 1)[1])
        deep = b"[" * 200_000
        path = "/v1/completions"
        quote = b'{"model":"%s","max_tokens":2,"prompt":"' % c.model.encode()
        odd = {
            "not json": (post(path, b"\x00\x01\x02"), 400),
            "empty": (post(path, b""), 400),
            "half": (post(path, quote), 400),
            "deep": (post(path, b'{"prompt":' + deep), 400),
            "deep objects": (post(path, b'{"prompt":' + b'{"a":' * 100_000), 400),
            "invalid utf-8": (post(path, quote + b'\xff\xfe\xc0"}'), 400),
            "nul in a name": (post(path, b'{"mo\\u0000del":"x","prompt":"a"}'), 400),
            "lone surrogate": (post(path, quote + b'\\ud800"}'), 400),
            "number too long": (post(path, quote + b'a","seed":' + b"9" * 5000 + b"}"), 400),
            "exponent": (post(path, quote + b'a","temperature":1e999999}'), 400),
            "over the limit": (post(path, b"x" * (2 << 20)), 413),
            "bad chunk": (post(path, b"zz\r\nabc\r\n", "Transfer-Encoding: chunked"), 400),
            "huge chunk": (post(path, b"ffffffffffffffff\r\nabc", "Transfer-Encoding: chunked"), 0),
            "chunk that is longer": (post(path, b"2\r\nxyz\r\n0\r\n\r\n", "Transfer-Encoding: chunked"), 400),
            "negative chunk": (post(path, b"-1\r\nx\r\n0\r\n\r\n", "Transfer-Encoding: chunked"), 400),
            "chunk over the limit": (post(path, b"200000\r\n" + b"x" * (2 << 20) + b"\r\n0\r\n\r\n",
                                          "Transfer-Encoding: chunked"), 413),
            "many trailers": (post(path, b"1\r\nx\r\n0\r\n" + b"X: y\r\n" * 50_000 + b"\r\n",
                                   "Transfer-Encoding: chunked"), 431),
            "length too short": (post(path, b'{"prompt":"a"}', "Content-Length: 5"), 400),
            "length too long": (post(path, b'{"prompt":"a"}', "Content-Length: 500"), 0),
            "length that is a word": (post(path, b"{}", "Content-Length: ten"), 400),
            "body of a GET": (b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 2000000\r\n\r\n" +
                              b"x" * 2_000_000, 413),
            "negative length": (post(path, b"x", "Content-Length: -5"), 400),
            # Where a proxy could see other requests than the router does.
            "both lengths": (post(path, b"0\r\n\r\n", "Content-Length: 3",
                                  "Transfer-Encoding: chunked"), 400),
            "two lengths": (post(path, b'{"prompt":"a"}', "Content-Length: 14", "Content-Length: 2"), 400),
            "unknown coding": (post(path, b"x", "Transfer-Encoding: xchunked"), 400),
            "two codings": (post(path, b"1\r\nx\r\n0\r\n\r\n", "Transfer-Encoding: gzip, chunked"), 400),
            "blank in a name": (post(path, b"GET /metrics HTTP/1.1\r\n\r\n", "Content-Length: 0",
                                     "Transfer-Encoding : chunked"), 400),
            "zero byte in a path": (b"GET /metrics%00.html HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
                                    404),
            "huge header": (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * (1 << 20) + b"\r\n\r\n", 0),
            "cookies": (b"GET / HTTP/1.1\r\nHost: x\r\nCookie: " + b"a=b; " * 200_000 + b"\r\n\r\n", 431),
            "long line": (b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
            "many parameters": (b"GET /health?" + b"a=b&" * 4000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 0),
            "another version": (b"GET / HTTP/9.9\r\nHost: x\r\n\r\n", 505),
            "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), 0),
            "many headers": (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 50_000 + b"\r\n", 0),
            "long path": (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
                          0),
            "odd path": (b"GET /%ff%fe/../..//v1 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
                         404),
            "method": (post(path, b"").replace(b"POST", b"BREW", 1), 405),
            "old": (b"GET /health\r\n\r\n", 0),
        }
        for name, (request, status) in odd.items():
            reply = talk(port, request)
            first = reply.split(b"\r\n", 1)[0]
            assert not reply or first.startswith(b"HTTP/1."), (name, first)
            if status:
                assert f" {status} ".encode() in first, (name, reply[:300])
            else:
                assert b" 200 " not in first and b" 5" not in first[:12], (name, first)
        # Half-closed: to the server a client that has left. It need not be answered, but it has to go.
        for request in (b"", post(path, quote + b'a"}'), b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
                        b"GET /health HTTP/1.1\r\nHos", post(path, quote)[:-10]) * 4:
            with connect(port) as s:
                s.sendall(request)
                s.shutdown(socket.SHUT_WR)
                first = s.recv(65536)
                assert first == b"" or first.startswith(b"HTTP/1.1 "), first
                while s.recv(65536):
                    pass
        # Pipelined: every request gets its answer, in order.
        three = (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" +
                 post(path, quote + b'a"}').replace(b"Connection: close\r\n", b"") +
                 b"GET /nowhere HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        with connect(port, 60) as s:
            s.sendall(three)
            got = b""
            while chunk := s.recv(65536):
                got += chunk
        codes = [got[at + 9:at + 12] for at in range(len(got)) if got.startswith(b"HTTP/1.1 ", at)]
        assert codes == [b"200", b"200", b"404"], got[:2000]
        check_sound(c, expected)


@test
def test_wrong_types_in_every_field_are_400(options):
    values = (None, True, -1, 0.5, 10 ** 18, 1e300, "x", [], [None], {"a": 1})
    fields = ("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "min_tokens", "n",
              "best_of", "stream", "stream_options", "stop", "seed", "temperature", "top_p", "top_k",
              "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
              "logprobs", "top_logprobs", "echo", "suffix", "user", "cache_salt", "priority",
              "ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "response_format",
              "tools", "tool_choice", "tandem")
    short = ["--context-max", "128"]  # where max_tokens is absent or absurd
    with Cluster(options.bin, kv_memory="256M", kvstore=0, prefill_args=short, decode_args=short,
                 router_args=short) as c:
        expected = ask(c).text
        connection = http.client.HTTPConnection(*c.address.rsplit(":", 1), timeout=60)
        bad = []
        for path, base in (("/v1/completions", {"prompt": "a"}),
                           ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})):
            for name in fields:
                for value in values:
                    body = {"model": c.model, "max_tokens": 1, **base, name: value}
                    connection.request("POST", path, json.dumps(body),
                                       {"Content-Type": "application/json"})
                    reply = connection.getresponse()
                    text = reply.read()
                    if reply.status not in (200, 400, 404) or \
                            (reply.status != 200 and "error" not in json.loads(text)):
                        bad.append((path, name, value, reply.status, text[:200]))
        connection.close()
        assert not bad, bad[:5]
        check_sound(c, expected)


def crowd(c, count, make, workers=64):
    """Statuses of count requests, in order; make(i) gives the parameters of one."""
    def one(i):
        try:
            return c.complete(check=False, **make(i)).status
        except (OSError, http.client.HTTPException) as error:
            return type(error).__name__
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        return list(pool.map(one, range(count)))


@test
def test_i6_flood_answers_429(options):
    """Pools of a few requests: what finds no room waits a bounded time, then 429; nothing else."""
    with Cluster(options.bin, prefill_args=["--kv-memory", "16M"], decode_args=["--kv-memory", "32M"],
                 router_args=["--queue-max", "8", "--queue-ms", "1000"]) as c:
        expected = ask(c).text
        statuses = crowd(c, 150, lambda i: {
            "prompt": f"{i} " + PROMPT * (1 + i % 3), "n": (1, 1, 4, 16)[i % 4],
            "max_tokens": (1, 8, 16)[i % 3], "stop": ["zzz"] if i % 5 == 0 else None,
            "logprobs": 5 if i % 7 == 0 else None, "echo": i % 14 == 0, "ignore_eos": True})
        kinds = set(statuses)
        assert kinds <= {200, 400, 429} and {200, 429} <= kinds, \
            {kind: statuses.count(kind) for kind in kinds}
        refused = c.complete(PROMPT * 200, check=False)
        assert refused.status == 400, refused.body
        check_sound(c, expected)


@test
def test_large_bodies_hold_up_nobody_else(options):
    """Each takes the thread that parses it long; a small one that comes behind them all is answered
    before most of them are."""
    with Cluster(options.bin, kvstore=0, kv_memory="256M") as c:
        body = json.dumps({"model": c.model, "prompt": "tide " * 1600000, "max_tokens": 1}).encode()
        head = (f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n").encode()
        host, port = c.address.rsplit(":", 1)
        large = [socket.create_connection((host, int(port)), timeout=c.http_timeout_s)
                 for _ in range(6)]
        try:
            for connection in large:
                connection.sendall(head + body[:-1])
            for connection in large:
                connection.sendall(body[-1:])
            for _ in range(4):  # for each of the threads, whose turn it is
                small = {"model": c.model, "prompt": PROMPT}
                assert c.request("POST", "/tokenize", small, check=True).json["tokens"]
            answered = select.select(large, [], [], 0)[0]
            assert len(answered) <= 2, len(answered)
            for connection in large:  # it is too long for the model
                assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")
        finally:
            for connection in large:
                connection.close()
        check_sound(c, ask(c).text)


@test
def test_clients_that_vanish_or_never_read_hold_nothing(options):
    with Cluster(options.bin, kv_memory="256M") as c:
        expected = ask(c).text
        port = int(c.address.rsplit(":", 1)[1])
        deaf = []
        for i in range(40):
            body = json.dumps({"model": c.model, "prompt": f"{i} " + PROMPT * (1 + i % 8), "n": 1 + i % 3,
                               "max_tokens": 400, "ignore_eos": True, "stream": i % 4 != 0}).encode()
            request = post("/v1/completions", body).replace(b"Connection: close\r\n", b"")
            if i % 5 == 0:  # never reads, stays for a while
                deaf.append(connect(port))
                deaf[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                deaf[-1].sendall(request)
            elif i % 5 == 1:  # half a body
                throw(port, request[:-40], reset=i % 2 == 0)
            else:
                throw(port, request, reset=i % 2 == 0)
                time.sleep(0.01 * (i % 7))
        time.sleep(1)
        for s in deaf:
            s.close()
        wait_until(lambda: c.metrics()["tandem_router_requests_running"] == 0, 30, "all are gone")
        check_sound(c, expected)


# --- processes that stop and come back ------------------------------------------------------------

@test
def test_i6_slow_senders_are_cut_off_and_others_are_not(options):
    """Slowloris: nothing, headers, bodies, a byte at a time for ever."""
    with Cluster(options.bin, kvstore=0, router_args=["--receive-ms", "1500"]) as c:
        host, port = c.processes["router"]["http"].rsplit(":", 1)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        openings = (b"", b"GET / HTTP/1.1\r\nX-Slow: ", head + b"Content-Length: 100000\r\n\r\n{",
                    head + b"Transfer-Encoding: chunked\r\n\r\n5\r\n")
        slow = []
        for opening in openings * 4:
            s = socket.create_connection((host, int(port)), 10)
            s.sendall(opening)
            s.setblocking(False)
            slow.append(s)
        # One that waits for its stream longer than that, and reads it, is none of them.
        stream = iter(c.complete("Once", stream=True, max_tokens=1500, ignore_eos=True))
        kept = http.client.HTTPConnection(host, int(port), timeout=30)
        kept.request("GET", "/health")
        kept.getresponse().read()
        left = list(slow)

        def all_cut():
            for s in list(left):
                try:
                    s.send(b"a")
                    if s.recv(100) == b"":
                        left.remove(s)
                except BlockingIOError:
                    pass
                except OSError:
                    left.remove(s)
            next(stream)
            assert c.request("GET", "/health").status == 200
            return not left
        wait_until(all_cut, 20, "slow senders are cut off")
        assert c.metrics()["tandem_router_slow_clients_total"] >= len(slow) - 4
        kept.request("GET", "/health")  # was silent for as long, between two requests
        assert kept.getresponse().status == 200
        kept.close()
        assert next(stream)["choices"]
        for s in slow:
            s.close()


@test
def test_router_restarted_on_its_ports_finds_its_nodes(options):
    with Cluster(options.bin, kv_memory="256M") as c:
        expected = ask(c).text
        for _ in range(2):
            for i in range(3):  # so that nodes have talked to each other
                ask(c, cache_salt=f"before{i}")
            c.restart("router")
            wait_until(lambda: is_ready(c), 15, "the nodes have come back by themselves")
            started = time.monotonic()
            assert ask(c, cache_salt="after").text == expected
            took = time.monotonic() - started
            assert took < 10, f"{took:.1f} s: a hand-off was lost"
        check_sound(c, expected)


@test
def test_f10_node_restarted_in_place(options):
    """Same id, another life: old blocks are no prefix any more, and nothing waits for the dead."""
    with Cluster(options.bin, kv_memory="256M") as c:
        expected = ask(c).text
        for process_id in ("kvstore-1", "prefill-1", "decode-1"):
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                under_way = [pool.submit(c.complete, f"{i} {PROMPT}", max_tokens=60, ignore_eos=True,
                                         check=False) for i in range(4)]
                c.restart(process_id)
                statuses = [future.result().status for future in under_way]
            assert set(statuses) <= {200, 502, 503}, statuses
            wait_until(lambda: is_ready(c), 15, "ready")
            check_sound(c, expected)


@test
def test_frozen_processes_thaw_and_serve(options):
    """Three seconds are past a death (2 s), short of a lease (5 s): every message of then comes late."""
    with Cluster(options.bin, kv_memory="256M") as c:
        expected = ask(c).text
        for process_id in c.ids():
            with concurrent.futures.ThreadPoolExecutor(6) as pool:
                under_way = [pool.submit(c.complete, f"{i} {PROMPT}", max_tokens=80, ignore_eos=True,
                                         check=False, stream=False) for i in range(6)]
                time.sleep(0.1)
                c.kill(process_id, signal.SIGSTOP)
                time.sleep(3)
                c.kill(process_id, signal.SIGCONT)
                statuses = [future.result().status for future in under_way]
            assert set(statuses) <= {200, 502, 503}, (process_id, statuses)
            check_sound(c, expected)


@test
def test_sigterm_under_load_drains(options):
    with Cluster(options.bin, kv_memory="256M", router_args=["--drain-ms", "60000"]) as c:
        ask(c)
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            under_way = [pool.submit(c.complete, f"{i} {PROMPT}", max_tokens=40, ignore_eos=True,
                                     check=False) for i in range(4)]
            wait_until(lambda: c.metrics()["tandem_router_requests_running"] == 4, 10, "4 run")
            c.kill("router", signal.SIGTERM)
            statuses = [future.result().status for future in under_way]
        assert statuses == [200] * 4, statuses
        wait_until(lambda: not c.alive("router"), 20, "the router has ended")
        for process_id in c.ids():
            if process_id != "router":
                assert c.alive(process_id)
        wait_until(lambda: not held_blocks(c), 30, "no block is held")


@test
def test_nodes_that_do_not_fit_are_told_why(options):
    with Cluster(options.bin, kv_memory="256M", kvstore=0) as c:
        expected = ask(c).text
        secret = os.path.join(c.run_dir, "cluster.secret")
        other = os.path.join(c.run_dir, "other.secret")
        with open(os.open(other, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            file.write(b"another secret of the right size....")
        endpoint = c.router_endpoint
        model = ["--model", os.path.join(ROOT, "build/models/SmolLM2-135M-Instruct.Q4_1.gguf"),
                 "--kv-memory", "64M"]
        strangers = (("decode", "wrong cluster secret", other, model),
                     ("prefill", "wrong precision", secret, [*model, "--precision", "exact"]),
                     ("decode", "wrong cluster secret or block size", secret,
                      [*model, "--block-tokens", "32"]),
                     ("kvstore", "wrong cluster secret", other, ["--capacity", "16M"]))
        running = []
        try:
            for number, (role, why, key, arguments) in enumerate(strangers):
                path = os.path.join(c.run_dir, f"stranger-{number}.log")
                with open(path, "wb") as log:
                    running.append((why, path, subprocess.Popen(
                        [os.path.join(options.bin, f"tandem-{role}"), "--id", f"stranger-{number}",
                         "--router", endpoint, "--cluster-secret-file", key, *arguments],
                        stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=c.env)))
            for why, path, _ in running:
                def told():
                    with open(path, encoding="utf-8", errors="replace") as file:
                        return any("router refused us" in line and why in line for line in file)
                wait_until(told, c.timeout_s, f"{path} says: {why}")
        finally:
            for _, _, process in running:
                process.terminate()
                process.wait()
        assert not any("stranger" in node for node in c.nodes())
        check_sound(c, expected)


@test
def test_an_idle_cluster_uses_no_cpu(options):
    def cpu_s(pid):
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            words = file.read().rsplit(")", 1)[1].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    with Cluster(options.bin, kv_memory="256M") as c:
        ask(c)
        wait_until(lambda: not held_blocks(c), 30, "no block is held")
        before = {process_id: cpu_s(pid) for process_id, pid in c.pids().items()}
        time.sleep(5)
        used = {process_id: (cpu_s(pid) - before[process_id]) / 5 for process_id, pid in c.pids().items()}
        assert all(share < 0.05 for share in used.values()), used


if __name__ == "__main__":
    main(__doc__)
