"""ucx_perftest with the work of tandem-bench transfer over tcp: eager active messages of a block's size.

usage: peer_ucx.py [--size B] [--repeat N]

Needs ucx_perftest (Debian's ucx-utils). It sends one buffer again and again and copies nothing out.
Prints one JSON object; the figure is the best of the repeats."""
import argparse
import json
import os
import socket
import subprocess
import sys
import time

BYTES = 1 << 30  # of one repeat
SETTINGS = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo", "UCX_RNDV_THRESH": "inf",
            "UCX_TCP_TX_SEG_SIZE": "256K", "UCX_TCP_RX_SEG_SIZE": "256K",
            "UCX_WARN_UNUSED_ENV_VARS": "n"}
LIMIT_S = 120


def run_once(size):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, **SETTINGS}
    server = subprocess.Popen(["ucx_perftest", "-p", str(port)], stdin=subprocess.DEVNULL,
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
    command = ["ucx_perftest", "127.0.0.1", "-p", str(port), "-t", "ucp_am_bw", "-s", str(size),
               "-n", str(max(BYTES // size, 16)), "-f", "-v"]
    try:
        deadline = time.monotonic() + 10
        while True:  # until the server listens
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, text=True, env=env, timeout=LIMIT_S,
                                  check=False)
            if done.returncode == 0 or time.monotonic() > deadline:
                break
            time.sleep(0.05)
    finally:
        server.kill()
        server.wait()
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or len(lines) < 2:
        sys.exit(f"peer_ucx: ucx_perftest failed: {done.stderr[-500:]}")
    columns = dict(zip(lines[-2].split(","), lines[-1].split(",")))
    return float(columns["overall_bw"]) * (1 << 20) / 1e9  # MiB/s


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=368640)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    print(json.dumps({"tcp_fetch_gb_s": max(run_once(options.size)
                                            for _ in range(options.repeat))}))


if __name__ == "__main__":
    main()
