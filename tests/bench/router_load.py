"""What a router alone can do: tandem-router with nodes that compute nothing (tandem-bench mock) and, as
its peer, sglang-router with back ends that answer at once (tandem-bench instant), under the same load
(tandem-bench load), in turn.

What is in the figures: ours parses, renders the chat, tokenises, hashes blocks, places, reserves at a
decode node, starts a prefill node, and makes JSON of tokens; the nodes' part, two rounds of messages, is
in them. As it is set up by default it leaves a short prompt to one node, as the peer does; figures that begin
with `split_` are of the longer way, where every prompt goes to a prefill node first. The peer's parses, keeps its tree of texts, chooses a back end and passes bytes on; what its back
end takes by itself is measured without it and taken off where a figure says `added`."""
import contextlib
import os
import re
import signal
import subprocess
import time
import urllib.request

BACK_ENDS = 4  # of the peer; as many prefill and as many decode nodes of ours
CONNECTIONS = 64
WAYS = (("", ()), ("split_", ("--self-prefill-tokens", "0")))
MANY = 1000  # nodes, for what placing takes
START_S = 60
PLACE = re.compile(r'^tandem_router_place_seconds_bucket\{le="([^"]+)"\} (\d+)$', re.MULTILINE)


def get(url):
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=5) as response:
        return response.read().decode()


def wait_for(what, look, fail):
    end = time.monotonic() + START_S
    while True:
        with contextlib.suppress(OSError):
            if look():
                return
        if time.monotonic() > end:
            fail(f"{what} did not come up within {START_S} s")
        time.sleep(0.05)


@contextlib.contextmanager
def process(command, log_path, **more):
    with open(log_path, "ab") as log:
        running = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log,
                                   **{"stdout": log, **more})
    try:
        yield running
    finally:
        running.send_signal(signal.SIGTERM)
        try:
            running.wait(timeout=20)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


@contextlib.contextmanager
def tandem(options, local_sh, way, prefill, decode, message_tokens, fail):
    """A router and its nodes; gives the router's address. way: one of WAYS."""
    run_dir = os.path.join(options.out, f"{way[0]}router-run")
    up = [local_sh, "up", "--dir", run_dir, "--bin", options.bin, "--model", options.model, "--port", "0",
          "--prefill", "0", "--decode", "0", "--kvstore", "0", "--", *way[1]]
    log_path = os.path.join(options.out, "router-run.log")
    with open(log_path, "ab") as log:
        if subprocess.run(up, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False).returncode:
            fail(f"the router did not come up: read {log_path}")
    try:
        with open(os.path.join(run_dir, "router.ready"), encoding="utf-8") as file:
            http, bus = file.read().split()
        mock = [os.path.join(options.bin, "tandem-bench"), "mock", "--router", bus, "--model",
                options.model, "--secret", os.path.join(run_dir, "cluster.secret"), "--prefill",
                str(prefill), "--decode", str(decode), "--message-tokens", str(message_tokens)]
        url = f"http://{http}"
        with process(mock, log_path):
            wait_for("mock nodes", lambda: all(
                f'tandem_router_nodes{{role="{role}"}} {count}\n' in get(f"{url}/metrics")
                for role, count in (("prefill", prefill), ("decode", decode))), fail)
            yield url
    finally:
        subprocess.run([local_sh, "down", "--dir", run_dir], stdin=subprocess.DEVNULL,
                       stdout=subprocess.DEVNULL, check=False)


@contextlib.contextmanager
def instant(options):
    log_path = os.path.join(options.out, "instant.log")
    command = [os.path.join(options.bin, "tandem-bench"), "instant"]
    with process(command, log_path, stdout=subprocess.PIPE, text=True) as running:
        yield running.stdout.readline().strip()


@contextlib.contextmanager
def sglang(options, program, free_port, fail):
    """sglang-router before its back ends; gives its address, and that of one back end."""
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(instant(options)) for _ in range(BACK_ENDS)]
        port = free_port()
        command = [program, "launch", "--worker-urls", *workers, "--policy", "cache_aware", "--host",
                   "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()),
                   "--log-level", "error"]
        stack.enter_context(process(command, os.path.join(options.out, "sglang-router.log")))
        url = f"http://127.0.0.1:{port}"
        wait_for("sglang-router", lambda: get(f"{url}/health") is not None, fail)
        yield url, workers[0]


def load(options, figures_of, url, connections, stream):
    return figures_of([os.path.join(options.bin, "tandem-bench"), "load", "--url", url, "--connections",
                       str(connections), "--seconds", "1" if options.quick else "4",
                       *(["--stream"] if stream else []), "--json"])


def measure(options, figures_of, url, direct, stream):
    """direct: what answers without the router, or None: all of the time is the router's."""
    name = "stream" if stream else "whole"
    many = load(options, figures_of, url, CONNECTIONS, stream)
    one = load(options, figures_of, url, 1, stream)
    off = load(options, figures_of, direct, 1, stream)["e2e_ms_p50"] if direct else 0
    return {f"{name}_c{CONNECTIONS}_rps": many["requests_s"],
            f"{name}_c{CONNECTIONS}_ms_p50": many["e2e_ms_p50"],
            f"{name}_c{CONNECTIONS}_ms_p99": many["e2e_ms_p99"],
            f"{name}_c1_added_ms_p50": one["e2e_ms_p50"] - off}


def place_us(text, percent):
    """Of the histogram: where in its bucket, as if it were filled evenly."""
    below, under = 0.0, 0
    buckets = [(float(limit), int(count)) for limit, count in PLACE.findall(text) if limit != "+Inf"]
    wanted = buckets[-1][1] * percent / 100
    for limit, count in buckets:
        if count >= wanted and count > under:
            return 1e6 * (below + (limit - below) * (wanted - under) / (count - under))
        below, under = limit, count
    return 1e6 * below


def measure_placing(options, figures_of, local_sh, fail):
    with tandem(options, local_sh, WAYS[1], MANY // 2, MANY // 2, 16, fail) as url:
        many = load(options, figures_of, url, 16, False)
        text = get(f"{url}/metrics")
    return {f"place_{MANY}_nodes_us_p50": place_us(text, 50),
            f"place_{MANY}_nodes_us_p99": place_us(text, 99),
            f"whole_c16_{MANY}_nodes_rps": many["requests_s"]}


def run(options, local_sh, program, figures_of, median_of, free_port, fail):
    """(our figures, the peer's or None). program: sglang-router, or None."""
    ours, theirs = {}, {}
    with contextlib.ExitStack() as peer:
        url, direct = peer.enter_context(sglang(options, program, free_port, fail)) if program else (
            None, None)
        for stream in (False, True):
            # An answer of an instant step whole, or a token each, as the peer's back end sends events.
            with contextlib.ExitStack() as mine:
                urls = {way[0]: mine.enter_context(tandem(options, local_sh, way, BACK_ENDS, BACK_ENDS,
                                                          1 if stream else 16, fail)) for way in WAYS}
                rounds = [({prefix + name: value for prefix, at in urls.items() for name, value in
                            measure(options, figures_of, at, None, stream).items()},
                           measure(options, figures_of, url, direct, stream) if url else None)
                          for _ in range(options.rounds)]
            ours.update(median_of([mine for mine, _ in rounds]))
            if url:
                found = median_of([other for _, other in rounds])
                theirs.update({prefix + name: value for prefix, _ in WAYS for name, value in found.items()})
    ours.update(measure_placing(options, figures_of, local_sh, fail))
    return ours, theirs or None

