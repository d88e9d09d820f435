"""Mooncake's store with the work of tandem-bench store: a master, a process that owns the segment, and
this one, which puts, reads and looks up distinct values over tcp loopback.

usage: peer_mooncake.py [--size B] [--blocks N] [--batch N] [--repeat N]

Needs the wheel mooncake-transfer-engine (and what it links, e.g. libcudart) in this Python. Prints one
JSON object; each figure is the best of the repeats."""
import argparse
import ctypes
import json
import mmap
import os
import shutil
import socket
import subprocess
import sys
import time

LOOKUP_KEYS = 512
LOOKUPS = 400
START_S = 30
SEGMENT = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
rc = store.setup(sys.argv[1], "P2PHANDSHAKE", int(sys.argv[3]), 64 << 20, "tcp", "", sys.argv[2])
print("up" if rc == 0 else rc, flush=True)
sys.stdin.read()
store.close()
"""


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=1 << 20)
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=5)
    return parser.parse_args()


def start_master(port):
    import mooncake
    program = os.path.join(os.path.dirname(mooncake.__file__), "mooncake_master")
    if not os.access(program, os.X_OK):
        program = shutil.which("mooncake_master")
    process = subprocess.Popen([program, f"--rpc_port={port}", f"--metrics_port={free_port()}"],
                               stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return process
        except OSError:
            time.sleep(0.05)
    process.kill()
    sys.exit("peer_mooncake: mooncake_master did not come up")


def best(current, seconds):
    return seconds if current is None else min(current, seconds)


def measure(store, o):
    size = o.size * o.blocks
    memory = mmap.mmap(-1, 2 * size)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for i in range(o.blocks):
        memory[i * o.size:(i + 1) * o.size] = bytes([i % 251 + 1]) * o.size
    if store.register_buffer(base, 2 * size) != 0:
        sys.exit("peer_mooncake: memory cannot be registered")
    put = get = look = None
    for repeat in range(o.repeat):
        keys = [f"{repeat}/{i}" for i in range(o.blocks)]
        started = time.perf_counter()
        for at in range(0, o.blocks, o.batch):
            part = range(at, min(at + o.batch, o.blocks))
            codes = store.batch_put_from([keys[i] for i in part], [base + i * o.size for i in part],
                                         [o.size] * len(part))
            if any(code != 0 for code in codes):
                sys.exit(f"peer_mooncake: put: {codes}")
        put = best(put, time.perf_counter() - started)
        started = time.perf_counter()
        for at in range(0, o.blocks, o.batch):
            part = range(at, min(at + o.batch, o.blocks))
            codes = store.batch_get_into([keys[i] for i in part],
                                         [base + size + i * o.size for i in part],
                                         [o.size] * len(part))
            if any(code != o.size for code in codes):
                sys.exit(f"peer_mooncake: get: {codes}")
        get = best(get, time.perf_counter() - started)
        asked = [keys[i % o.blocks] for i in range(LOOKUP_KEYS)]
        started = time.perf_counter()
        for _ in range(LOOKUPS):
            if sum(store.batch_is_exist(asked)) != LOOKUP_KEYS:
                sys.exit("peer_mooncake: keys are missing")
        look = best(look, time.perf_counter() - started)
        print(f"peer_mooncake: {repeat + 1}/{o.repeat}: put {size / put / 1e9:.2f} GB/s, "
              f"get {size / get / 1e9:.2f} GB/s", file=sys.stderr, flush=True)
    return {"put_gb_s": size / put / 1e9, "get_gb_s": size / get / 1e9,
            "put_ops_s": o.blocks / put, "get_ops_s": o.blocks / get,
            "lookup_keys_s": LOOKUPS * LOOKUP_KEYS / look}


def main():
    o = parse()
    from mooncake.store import MooncakeDistributedStore
    port = free_port()
    master = start_master(port)
    address = f"127.0.0.1:{port}"
    segment_bytes = max(2 * (o.repeat + 1) * o.size * o.blocks, 1 << 28)  # nothing is evicted
    segment = subprocess.Popen(
        [sys.executable, "-c", SEGMENT, f"127.0.0.1:{free_port()}", address, str(segment_bytes)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        for line in segment.stdout:  # its own log comes there too
            if line.strip() == "up":
                break
        else:
            sys.exit("peer_mooncake: no segment")
        store = MooncakeDistributedStore()
        rc = store.setup(f"127.0.0.1:{free_port()}", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", address)
        if rc != 0:
            sys.exit(f"peer_mooncake: set-up answered {rc}")
        figures = measure(store, o)
    finally:
        segment.kill()
        master.kill()
    print(json.dumps(figures), flush=True)
    os._exit(0)  # its threads may wait for the master for long


if __name__ == "__main__":
    main()
