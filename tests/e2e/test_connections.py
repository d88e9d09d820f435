#!/usr/bin/env python3
"""Ten thousand connections to one router, and more than it has descriptors for.

    test_connections.py --hold PORT COUNT    the process that holds them: for the test alone"""
import os
import resource
import socket
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import Cluster, main, test, wait_until

COUNT = 10_000
LIMIT = COUNT + 256
SPARE = 512  # descriptors beside the connections, of the router and of who holds them
HALVES = (b"", b"GET /health HTTP/1.1\r\nHost: x\r\nX-Half: ",
          b"", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{\"prompt\":")


def hold(port, count):
    """Opens them, every second one with half a request, and says so; closes them when told to."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    held = []
    for i in range(count):
        held.append(socket.create_connection(("127.0.0.1", port), timeout=60))
        held[-1].sendall(HALVES[i % len(HALVES)])
    print("held", flush=True)
    sys.stdin.readline()
    open_still = 0
    for s in held:
        s.setblocking(False)
        try:
            open_still += s.recv(1) != b""
        except BlockingIOError:
            open_still += 1
        except OSError:
            pass
        s.close()
    print(open_still, flush=True)


def status_kib(pid, name):
    with open(f"/proc/{pid}/status", encoding="utf-8") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name))


def descriptors(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


class Others:
    """Clients that go on asking meanwhile: each answer has to be right."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.expected = cluster.complete("The sea", temperature=0, max_tokens=4).text
        self.times_s = []  # of GET /health
        self.completions = 0
        self.wrong = []
        self.stopped = threading.Event()
        self.threads = [threading.Thread(target=self._go, args=(each,))
                        for each in (self._health, self._complete)]
        for thread in self.threads:
            thread.start()

    def _health(self):
        began = time.monotonic()
        assert self.cluster.request("GET", "/health", check=True).json == {"status": "ok"}
        self.times_s.append(time.monotonic() - began)

    def _complete(self):
        assert self.cluster.complete("The sea", temperature=0, max_tokens=4).text == self.expected
        self.completions += 1

    def _go(self, ask):
        while not self.stopped.is_set():
            try:
                ask()
            except Exception as error:  # shown by the test's own thread
                self.wrong.append(repr(error)[:500])
                return

    def so_many_more(self, count):
        """Until that many of each were answered from now on."""
        health, completions = len(self.times_s) + count, self.completions + count
        wait_until(lambda: self.wrong or (len(self.times_s) >= health and
                                          self.completions >= completions), 60, "others are answered")

    def end(self):
        self.stopped.set()
        for thread in self.threads:
            thread.join()
        assert not self.wrong, self.wrong


class Holder:
    """The process that holds connections to a cluster's router."""

    def __init__(self, cluster, count):
        self.process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "--hold", cluster.address.rsplit(":", 1)[1],
             str(count)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __enter__(self):
        assert self.process.stdout.readline() == b"held\n"
        return self

    def close(self):
        """How many were open to the end."""
        return int(self.process.communicate(b"\n", timeout=60)[0])

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()


@test
def test_ten_thousand_connections_hold_up_nobody(options):
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    count = COUNT if hard == resource.RLIM_INFINITY else min(COUNT, hard - SPARE)
    with Cluster(options.bin, kv_memory="256M", kvstore=0,
                 router_args=["--connections-max", str(LIMIT), "--receive-ms", "600000"]) as c:
        pid = c.pids()["router"]
        others = Others(c)
        try:
            others.so_many_more(5)
            before_fds, before_kib = descriptors(pid), status_kib(pid, "VmRSS")
            with Holder(c, count) as holder:
                wait_until(lambda: descriptors(pid) >= before_fds + count - 16, 30, "all are taken")
                others.so_many_more(20)
                more_kib = status_kib(pid, "VmRSS") - before_kib
                assert holder.close() == count, "none is cut off before its time"
            wait_until(lambda: descriptors(pid) <= before_fds + 8, 30, "their descriptors are closed")
            # A sanitizer keeps what was freed for a while.
            wait_until(lambda: "san-" in options.bin or
                       status_kib(pid, "VmRSS") - before_kib < 4096 + more_kib / 4, 30,
                       "their memory is given back")
        finally:
            others.end()
        times = sorted(others.times_s)
        print(f"    {count} connections, {more_kib / count:.1f} KiB each; GET /health p99 "
              f"{times[len(times) * 99 // 100] * 1e3:.1f} ms of {len(times)}")
        assert c.alive("router")
        assert c.complete("The sea", temperature=0, max_tokens=4).text == others.expected


@test
def test_clients_that_leave_amid_a_request_are_let_go(options):
    """Long before they would be cut off for being slow."""
    with Cluster(options.bin, prefill=0, decode=0, kvstore=0) as c:
        pid = c.pids()["router"]
        port = int(c.address.rsplit(":", 1)[1])
        before = descriptors(pid)
        for i in range(200):
            with socket.create_connection(("127.0.0.1", port), timeout=c.http_timeout_s) as s:
                s.sendall(HALVES[i % len(HALVES)])
        wait_until(lambda: descriptors(pid) <= before + 2, 20, "their descriptors are closed")
        assert c.metrics()["tandem_router_slow_clients_total"] == 0


@test
def test_more_connections_than_descriptors(options):
    """The router is out of descriptors: who is connected is served, others are once there are some."""
    with Cluster(options.bin, prefill=0, decode=0, kvstore=0) as c:
        pid = c.pids()["router"]
        port = int(c.address.rsplit(":", 1)[1])
        held = []

        def health(s):
            s.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            return s.recv(4096).startswith(b"HTTP/1.1 200 ")

        try:
            first = socket.create_connection(("127.0.0.1", port), timeout=c.http_timeout_s)
            assert health(first)
            most = descriptors(pid) + 20
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, most))
            for _ in range(100):  # the kernel takes them for the router
                held.append(socket.create_connection(("127.0.0.1", port), timeout=c.http_timeout_s))
            wait_until(lambda: descriptors(pid) == most, 10, "there are no descriptors left")
            for _ in range(20):
                assert health(first)
            for s in held[:90]:
                s.close()
            assert health(held[-1])
        finally:
            for s in held:
                s.close()
        wait_until(lambda: descriptors(pid) < most - 15, 10, "descriptors are closed")
        assert c.request("GET", "/health", check=True).status == 200
        first.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--hold"]:
        hold(int(sys.argv[2]), int(sys.argv[3]))
    else:
        main(__doc__)
