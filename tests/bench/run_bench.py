#!/usr/bin/env python3
"""Every figure of tandem-bench in one run, and with --peers the same of llama.cpp, taking turns so that
noise hits both. Writes one JSON file for each subject and a plot, and prints one table.

With --peers, llama-cpp-python and llama-server are built from its PyPI source unless PEER_VENV (a venv
that has it) and PEER_SERVER (a llama-server program) say where they are.

usage: tests/bench/run_bench.py [--bin DIR] [--model FILE] [--out DIR] [--peers] [--only SUBJECTS] [--quick]
"""
import argparse
import glob
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request

import router_load

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LOCAL = os.path.join(ROOT, "deploy", "local.sh")
SETUP = os.path.join(ROOT, "deploy", "setup.sh")
PEER_VERSION = "llama-cpp-python==0.3.36"
PEER_FLAGS = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF",
              "-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF",
              "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF"]
ROUNDS = 3  # of both sides, in turn
SESSIONS = 16
TURNS = 4
SUBJECTS = ("model", "kv", "router", "transfer", "store", "hot", "handoff", "spec", "serve")
PEER_ROUTER_VERSION = "sglang-router==0.3.2"
START_S = 120  # for a server to come up

# What is expected of figures that need no peer: subject, key, at least or at most what (a number, or
# a multiple of another figure of that run).
LIMITS = [("model", "attention_gmac_s", ">=", 75),
          ("model", "read_fraction", ">=", 0.85),
          ("model", "verify_4_ms", "<=", ("verify_1_ms", 1.8)),
          ("kv", "match_us", "<=", 20),
          ("kv", "bytes_per_block", "<=", 64),
          ("kv", "allocs_per_step", "<=", 0),
          ("router", "match_us", "<=", 10),
          ("router", "event_blocks_s", ">=", 3.3e6),
          ("transfer", "shm_fetch_gb_s", ">=", ("shm_copy_gb_s", 0.9)),
          ("store", "shm_lookup_keys_s", ">=", 2e6),
          ("store", "shm_recovery_100k_s", "<=", 2),
          ("hot", "busiest_share_hot", "<=", ("busiest_share_one", 0.9)),
          ("hot", "hot_replicas_cooled", "<=", 0),
          ("spec", "auto_worst_times", ">=", 0.95),
          ("spec", "auto_of_best", ">=", 0.97),
          ("spec", "copy_prompt_lookup_b1_times", ">=", 1.8),
          ("handoff", "shm_split_ttft_ratio", "<=", 1.05),
          ("handoff", "tcp_split_ttft_ratio", "<=", 1.05),
          ("handoff", "cached_ttft_ratio", "<=", 0.15),
          ("handoff", "chat_turn_ttft_ms_p50", "<=", 150),
          ("router", "place_1000_nodes_us_p99", "<=", 100)]
# How many times as good as the peer figures should be; others at least as good.
PEER_TARGETS = {"tcp_fetch_gb_s": 0.8, "tcp_put_gb_s": 2.0, "tcp_get_gb_s": 2.0, "shm_put_gb_s": 5.0,
                "shm_get_gb_s": 5.0, "prefill_512_tok_s": 4.0, "prefill_2048_tok_s": 3.8, "decode_b1_tok_s": 2.0,
                "decode_b8_tok_s": 4.5, "decode_b16_tok_s": 4.5, "verify_4_ms": 4.5,
                "tok_s": 3.0, "ttft_ms_p90": 2.0, "whole_c64_rps": 2.0, "stream_c64_rps": 2.0}
PEERS = {"model": "llama.cpp", "serve": "llama-server", "transfer": "ucx_perftest",
         "store": "Mooncake's store over tcp", "router": "sglang-router"}


def say(text):
    print(f"bench: {text}", file=sys.stderr, flush=True)


def fail(text):
    sys.exit(f"bench: error: {text}")


def is_better_low(key):
    return ("_ms" in key or "_us" in key or key.endswith(("_mb", "_ratio", "_ns", "recovery_100k_s")) or
            key.startswith("busiest_share") or
            key in ("errors", "bytes_per_block", "allocs_per_step", "hot_replicas_cooled"))


# --- running --------------------------------------------------------------------------------------

def figures_of(command, env=None):
    """Runs a program that prints one JSON object; its progress goes to the terminal."""
    say(" ".join(os.path.relpath(word) if os.path.isabs(word) else word for word in command))
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
                          check=False, env={**os.environ, **(env or {})}, cwd=ROOT)
    if done.returncode != 0:
        fail(f"{os.path.basename(command[0])} {command[1]} failed (exit code {done.returncode})")
    return json.loads(done.stdout)


def best_of(rounds):
    """The best of each figure over several runs."""
    return {key: (min if is_better_low(key) else max)(each[key] for each in rounds)
            for key in rounds[0] if all(key in each for each in rounds)}


def median_of(rounds):
    """For loads, whose figures hang together."""
    return {key: statistics.median(each[key] for each in rounds)
            for key in rounds[0] if all(key in each for each in rounds)}


# --- servers --------------------------------------------------------------------------------------

class Tandem:
    """A cluster; url is where it serves."""

    def __init__(self, options):
        self.dir = os.path.join(options.out, "run")
        self.command = [LOCAL, "up", "--dir", self.dir, "--bin", options.bin, "--model",
                        options.model, "--port", "0", "--threads", str(options.threads)]

    def __enter__(self):
        say("starting a cluster")
        os.makedirs(self.dir, exist_ok=True)
        log_path = os.path.join(self.dir, "up.log")
        try:
            # A file, not a pipe: the cluster outlives the script and would hold a pipe open.
            with open(log_path, "wb") as log:
                subprocess.run(self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                               check=True)
            with open(os.path.join(self.dir, "cluster.json"), encoding="utf-8") as file:
                router = next(p for p in json.load(file) if p["role"] == "router")
        except BaseException as why:
            self.__exit__(None, None, None)
            if isinstance(why, subprocess.CalledProcessError):
                with open(log_path, encoding="utf-8", errors="replace") as log:
                    fail(f"the cluster did not come up:\n{log.read()[-2000:]}")
            raise
        self.url = f"http://{router['http']}"
        return self

    def __exit__(self, *_):
        subprocess.run([LOCAL, "down", "--dir", self.dir], stdin=subprocess.DEVNULL,
                       stdout=subprocess.DEVNULL, check=False)


class LlamaServer:
    """llama-server with a slot for each session, and the same threads."""

    def __init__(self, options, program):
        self.log_path = os.path.join(options.out, "llama-server.log")
        # Each slot has room for a conversation; unified, so that a prompt may be longer than a share.
        self.command = [program, "-m", options.model, "--host", "127.0.0.1", "-np", str(SESSIONS),
                        "-c", str(SESSIONS * 2048), "-t", str(options.threads), "-tb",
                        str(options.threads), "--no-webui"]

    def __enter__(self):
        with open(self.log_path, "wb") as log:
            port = free_port()
            say(f"starting llama-server on port {port}")
            self.process = subprocess.Popen(self.command + ["--port", str(port)],
                                            stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_S
        while not answers(f"{self.url}/health"):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.__exit__(None, None, None)
                fail(f"llama-server did not come up: read {self.log_path}")
            time.sleep(0.1)
        return self

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def answers(url):
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=2) as response:
            return response.status == 200
    except OSError:
        return False


# --- the peer's programs --------------------------------------------------------------------------

def run_logged(command, log_path, what, env=None):
    """A long step: one line every few seconds says that it is still at work."""
    say(f"{what} (log: {os.path.relpath(log_path, ROOT)})")
    with open(log_path, "ab") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                   env={**os.environ, **(env or {})})
        began = time.monotonic()
        try:
            while True:
                try:
                    code = process.wait(timeout=10)
                    break
                except subprocess.TimeoutExpired:
                    say(f"{what}: {time.monotonic() - began:.0f} s")
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if code != 0:
        with open(log_path, encoding="utf-8", errors="replace") as log:
            fail(f"{what} failed:\n{log.read()[-2000:]}")


def peer_python(options):
    """A Python that has llama-cpp-python."""
    venv = os.environ.get("PEER_VENV") or os.path.join(options.out, "venv")
    python = os.path.join(venv, "bin", "python")
    ready = subprocess.run([python, "-c", "import llama_cpp"], stdout=subprocess.DEVNULL,
                           stderr=subprocess.DEVNULL, check=False) if os.path.exists(python) else None
    if ready is not None and ready.returncode == 0:
        return python
    if os.environ.get("PEER_VENV"):
        fail(f"PEER_VENV={venv} has no llama_cpp")
    log = os.path.join(options.out, "venv.log")
    run_logged([sys.executable, "-m", "venv", venv], log, "making a venv")
    run_logged([python, "-m", "pip", "install", PEER_VERSION, "numpy"], log,
               "building llama-cpp-python, some 20 minutes", {"CMAKE_ARGS": "-DGGML_NATIVE=ON"})
    return python


def peer_server(options, python):
    """The program llama-server, built from the llama.cpp that llama-cpp-python's source holds."""
    program = os.environ.get("PEER_SERVER")
    if program:
        return program if os.access(program, os.X_OK) else fail(f"PEER_SERVER={program} is no program")
    folder = os.path.join(options.out, "llama-server")
    program = os.path.join(folder, "build", "bin", "llama-server")
    if os.access(program, os.X_OK):
        return program
    os.makedirs(folder, exist_ok=True)
    log = os.path.join(folder, "build.log")
    run_logged([python, "-m", "pip", "download", "--no-binary", "llama-cpp-python", "--no-deps", "-d",
                folder, PEER_VERSION], log, "fetching llama.cpp's source")
    archive = glob.glob(os.path.join(folder, "llama_cpp_python-*.tar.gz"))[0]
    run_logged(["tar", "-xzf", archive, "-C", folder], log, "unpacking it")
    source = glob.glob(os.path.join(folder, "llama_cpp_python-*", "vendor", "llama.cpp"))[0]
    build = os.path.join(folder, "build")
    run_logged(["cmake", "-S", source, "-B", build, *PEER_FLAGS], log, "configuring llama-server")
    run_logged(["cmake", "--build", build, "--target", "llama-server", "-j", str(os.cpu_count())], log,
               "building llama-server, some 20 minutes")
    return program


def peer_tools(options):
    if not os.environ.get("PEER_VENV") or not os.environ.get("PEER_SERVER"):
        wanted = [tool for tool in ("g++", "cmake") if shutil.which(tool) is None]
        if wanted and subprocess.run([SETUP, *wanted], check=False).returncode != 0:
            fail(f"{' and '.join(wanted)}: needed to build llama.cpp")
    python = peer_python(options)
    return python, peer_server(options, python)


# --- subjects -------------------------------------------------------------------------------------

def bench_command(options, subject, *args):
    repeat = ["--repeat", "1"] if options.quick and subject != "serve" else []
    return [os.path.join(options.bin, "tandem-bench"), subject, *map(str, args), *repeat, "--json"]


def run_model(options, python):
    ours, theirs = [], []
    peer = [python, os.path.join(ROOT, "tests/bench/peer_llamacpp.py"), options.model, "--threads",
            str(options.threads), *(["--repeat", "1"] if options.quick else [])]
    for _ in range(options.rounds if python else 1):
        ours.append(figures_of(bench_command(options, "model", "--model", options.model, "--threads",
                                             options.threads)))
        if python:
            theirs.append(figures_of(peer))
    best = best_of(ours)
    if "read_fraction" in best:  # both of its halves are of one run
        best["read_fraction"] = statistics.median(figures["read_fraction"] for figures in ours)
    return best, best_of(theirs) if theirs else None


def mooncake_python():
    """A Python that has Mooncake's store, or None: PEER_MOONCAKE names a venv of it."""
    venv = os.environ.get("PEER_MOONCAKE")
    if not venv:
        return None
    python = os.path.join(venv, "bin", "python")
    ready = subprocess.run([python, "-c", "import mooncake.store"], stdout=subprocess.DEVNULL,
                           stderr=subprocess.PIPE, text=True, check=False)
    if ready.returncode != 0:
        fail(f"PEER_MOONCAKE={venv}: {ready.stderr.strip().splitlines()[-1]}")
    return python


def sglang_router(options):
    """The peer's program: PEER_SGLANG names a venv that has it, else one is made."""
    venv = os.environ.get("PEER_SGLANG") or os.path.join(options.out, "venv-sglang")
    program = os.path.join(venv, "bin", "sglang-router")
    if not os.access(program, os.X_OK) and os.environ.get("PEER_SGLANG"):
        fail(f"PEER_SGLANG={venv} has no sglang-router")
    if not os.access(program, os.X_OK):
        log = os.path.join(options.out, "venv-sglang.log")
        run_logged([sys.executable, "-m", "venv", venv], log, "making a venv")
        run_logged([os.path.join(venv, "bin", "python"), "-m", "pip", "install", PEER_ROUTER_VERSION],
                   log, "fetching sglang-router")
    return program


def by_carrier(carrier, figures):
    return {f"{carrier}_{key}": value for key, value in figures.items()}


def run_store(options):
    """Both carriers, and Mooncake's by tcp beside them: between processes it has no other here."""
    python = mooncake_python() if options.peers else None
    ours, theirs = [], []
    for _ in range(options.rounds if python else 1):
        ours.append({})
        for carrier in ("shm", "tcp"):
            ours[-1].update(by_carrier(carrier, figures_of(
                bench_command(options, "store", "--carrier", carrier))))
        if python:
            figures = figures_of([python, os.path.join(ROOT, "tests/bench/peer_mooncake.py"),
                                  *(["--repeat", "1"] if options.quick else [])])
            theirs.append({**by_carrier("shm", figures), **by_carrier("tcp", figures)})
    return best_of(ours), best_of(theirs) if theirs else None


def run_transfer(options):
    theirs = None
    if options.peers and shutil.which("ucx_perftest") is None:
        subprocess.run([SETUP, "ucx-utils"], check=False)
    ours = [figures_of(bench_command(options, "transfer"))]
    if options.peers and shutil.which("ucx_perftest"):
        theirs = [figures_of([sys.executable, os.path.join(ROOT, "tests/bench/peer_ucx.py"),
                              *(["--repeat", "1"] if options.quick else [])])]
        ours.append(figures_of(bench_command(options, "transfer")))
    return best_of(ours), best_of(theirs) if theirs else None


def run_spec(options):
    """Ratios to none by kind, drafter and batch, and how auto compares with the best single choice."""
    rows = figures_of(bench_command(
        options, "spec", "--model", options.model, "--bin", options.bin, "--local-sh", LOCAL,
        *(["--tokens", 32, "--batches", "1,4"] if options.quick else [])))["rows"]
    figures = {f"{row['kind']}_{row['drafter']}_b{row['batch']}_times": row["ratio"] for row in rows
               if row["drafter"] != "none"}
    cells = {(row["kind"], row["batch"]) for row in rows}
    speed = {(row["kind"], row["batch"], row["drafter"]): row["tok_s"] for row in rows}
    best = {cell: max(value for key, value in speed.items() if key[:2] == cell and key[2] != "auto")
            for cell in cells}
    figures["auto_worst_times"] = min(row["ratio"] for row in rows if row["drafter"] == "auto")
    figures["auto_of_best"] = statistics.geometric_mean(
        speed[(*cell, "auto")] / best[cell] for cell in cells)
    return figures, None


def run_serve(options, program):
    def load(server, seed):
        return figures_of(bench_command(
            options, "serve", "--url", server.url, "--sessions", 4 if options.quick else SESSIONS,
            "--turns", 2 if options.quick else TURNS, "--seed", seed, "--ignore-eos", "--timeout", 600))

    with Tandem(options) as ours:
        if not program:
            return load(ours, 1), None
        with LlamaServer(options, program) as theirs:
            rounds = [(load(ours, seed), load(theirs, seed)) for seed in range(1, options.rounds + 1)]
    return median_of([r[0] for r in rounds]), median_of([r[1] for r in rounds])


def run_router(options):
    """Its index alone, and all of it before nodes that compute nothing."""
    index = figures_of(bench_command(options, "router"))
    ours, theirs = router_load.run(options, LOCAL, sglang_router(options) if options.peers else None,
                                   figures_of, median_of, free_port, fail)
    return {**index, **ours}, theirs


def run_subjects(options):
    """{subject: (our figures, the peer's or None)}; each is written as soon as it is there."""
    python, program = (peer_tools(options) if options.peers and
                       {"model", "serve"} & set(options.subjects) else (None, None))
    runs = {"model": lambda: run_model(options, python),
            "kv": lambda: (figures_of(bench_command(options, "kv")), None),
            "transfer": lambda: run_transfer(options),
            "store": lambda: run_store(options),
            "hot": lambda: (figures_of(bench_command(
                options, "hot", "--model", options.model, "--bin", options.bin, "--local-sh",
                LOCAL)), None),
            "handoff": lambda: (figures_of(bench_command(
                options, "handoff", "--model", options.model, "--tokens", 2048, "--bin", options.bin, "--threads",
                options.threads, "--local-sh", LOCAL)), None),
            "spec": lambda: run_spec(options),
            "serve": lambda: run_serve(options, program),
            "router": lambda: run_router(options)}
    results = {}
    for number, subject in enumerate(options.subjects, 1):
        say(f"{number}/{len(options.subjects)} {subject}")
        results[subject] = runs[subject]()
        for name, figures in zip((subject, f"{subject}_peer"), results[subject]):
            if figures is not None:
                with open(os.path.join(options.out, f"{name}.json"), "w", encoding="utf-8") as file:
                    json.dump(figures, file, indent=1)
                    file.write("\n")
    return results


# --- what is shown --------------------------------------------------------------------------------

def judged_by_itself(subject, figures):
    """{key: verdict} of the figures that have a limit."""
    verdicts = {}
    for of, key, way, limit in LIMITS:
        if of != subject or key not in figures:
            continue
        if isinstance(limit, tuple):
            limit = figures[limit[0]] * limit[1]
        good = figures[key] >= limit if way == ">=" else figures[key] <= limit
        verdicts[key] = f"{'ok' if good else 'MISSED'} ({way} {limit:.2f})"
    return verdicts


# Not a matter of better or worse.
NEUTRAL = {"requests", "errors", "wall_s", "prompt_tokens", "completion_tokens", "cached_tokens",
           "prompt_tok_s", "requests_s"}


def shown(value):
    return f"{value:9}   " if isinstance(value, int) else f"{value:12.2f}"


def print_table(results):
    with_peer = any(theirs for _, theirs in results.values())
    print(f"{'':34}{'Tandem':>12}" + (f"{'peer':>12}{'times':>8}" if with_peer else ""))
    for subject, (ours, theirs) in results.items():
        verdicts = judged_by_itself(subject, ours)
        for key, value in ours.items():
            line = f"{subject + ' ' + key:34}{shown(value)}"
            other = (theirs or {}).get(key)
            if other and value and key not in NEUTRAL:
                times = other / value if is_better_low(key) else value / other
                line += f"{shown(other)}{times:8.2f}"
                target = PEER_TARGETS.get(key, 1.0)
                line += f"  {'ok' if times >= target else 'MISSED'} (>= {target:g})"
            elif other is not None:
                line += shown(other)
            print((line + (f"  {verdicts[key]}" if key in verdicts else "")).rstrip())
    if with_peer:
        print("times: how many times as good as the peer: " + ", ".join(
            f"{PEERS[subject]} ({subject})" for subject, (_, theirs) in results.items() if theirs))


PANELS = [("Tokens a second", "model", ["prefill_512_tok_s", "prefill_2048_tok_s", "decode_b1_tok_s",
                                       "decode_b8_tok_s", "decode_b16_tok_s"]),
          ("Pass of k rows, ms", "model", [f"verify_{k}_ms" for k in (1, 2, 4, 6, 8)]),
          ("Blocks from another process, GB/s", "transfer", ["shm_fetch_gb_s", "shm_copy_gb_s",
                                                             "tcp_fetch_gb_s"]),
          ("Time to first token, ms", "handoff", ["one_process_ttft_ms", "shm_split_ttft_ms",
                                                  "tcp_split_ttft_ms"]),
          ("Conversations: time to first token, ms", "serve",
           ["ttft_ms_p50", "ttft_ms_p90", "ttft_ms_p99"]),
          ("Conversations: time between tokens, ms", "serve", ["tbt_ms_p50", "tbt_ms_p90"])]


def plot(options, results):
    if shutil.which("gnuplot") is None and os.getuid() == 0:
        subprocess.run([SETUP, "gnuplot-nox"], check=False)
    if shutil.which("gnuplot") is None:
        say("no plot: gnuplot is not installed (as root: apt-get install gnuplot-nox)")
        return
    image = os.path.join(options.out, "bench.png")
    script = [f"set terminal pngcairo size 1400,900 font ',10'\nset output '{image}'",
              "set style data histograms\nset style histogram clustered gap 1",
              "set style fill solid 0.8\nset yrange [0:*]\nset offsets 0,0,graph 0.15,0\nset grid ytics",
              "set xtics rotate by -20",
              "set multiplot layout 2,3"]
    for number, (title, subject, keys) in enumerate(PANELS):
        ours, theirs = results.get(subject, ({}, None))
        rows = [f'"{key}" {ours[key]} {(theirs or {}).get(key, "NaN")}' for key in keys if key in ours]
        if not rows:
            continue
        script.append("\n".join([f"$data{number} << EOD", *rows, "EOD"]))
        script.append(f"set title '{title}'\nset xtics noenhanced")
        line = f"plot $data{number} using 2:xtic(1) title 'Tandem'"
        script.append(line + (f", $data{number} using 3 title \"{PEERS[subject]}\"" if theirs else ""))
    script.append("unset multiplot\n")
    path = os.path.join(options.out, "bench.gp")
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join(script))
    if subprocess.run(["gnuplot", path], check=False).returncode == 0:
        say(f"plot: {os.path.relpath(image, ROOT)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", default=os.path.join(ROOT, "build/bin"))
    parser.add_argument("--model", default=os.path.join(
        ROOT, "build/models/SmolLM2-135M-Instruct.Q4_1.gguf"))
    parser.add_argument("--out", default=os.path.join(ROOT, "build/bench"))
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--peers", action="store_true",
                        help="llama.cpp, ucx_perftest and, with PEER_MOONCAKE=VENV, Mooncake too")
    parser.add_argument("--only", default=",".join(SUBJECTS), help="subjects, with commas between")
    parser.add_argument("--quick", action="store_true",
                        help="one round, one repeat, few conversations: shows only that all works")
    options = parser.parse_args()
    options.rounds = 1 if options.quick else ROUNDS
    options.subjects = options.only.split(",")
    unknown = [subject for subject in options.subjects if subject not in SUBJECTS]
    if unknown:
        fail(f"--only wants {', '.join(SUBJECTS)}, not '{unknown[0]}'")
    for name in ("bin", "model", "out"):
        setattr(options, name, os.path.abspath(getattr(options, name)))
    os.makedirs(options.out, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are stopped
    results = run_subjects(options)
    print_table(results)
    plot(options, results)


if __name__ == "__main__":
    main()
