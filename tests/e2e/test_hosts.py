"""A cluster over several hosts, as README.md says it: each host a network namespace, tcp between them."""
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import ROOT, Skip, main, test, wait_until

MODEL = os.path.join(ROOT, "build/models/SmolLM2-135M-Instruct.Q4_1.gguf")


def ip(*args):
    subprocess.run(["ip", *args], check=True, capture_output=True)


class Hosts:
    """Namespaces a, b, c on one bridge, 10.77.0.1 to .3, and processes inside."""

    def __init__(self, options):
        self.bin = os.path.abspath(options.bin)
        self.tag = f"td{os.getpid()}"
        self.spaces = []
        self.processes = {}
        self.dir = tempfile.mkdtemp(prefix="tandem-hosts-")

    def __enter__(self):
        try:
            hub = self.space("hub")
            ip("-n", hub, "link", "add", "br0", "type", "bridge")
            ip("-n", hub, "link", "set", "br0", "up")
            for number, host in enumerate("abc", 1):
                name = self.space(host)
                ip("link", "add", f"v{host}", "netns", name, "type", "veth", "peer", "name",
                   f"h{host}", "netns", hub)
                ip("-n", hub, "link", "set", f"h{host}", "master", "br0", "up")
                ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", f"v{host}")
                ip("-n", name, "link", "set", f"v{host}", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except (subprocess.CalledProcessError, FileNotFoundError) as why:
            self.__exit__(None, None, None)
            raise Skip(f"network namespaces cannot be made here: {why}") from why
        secret = os.path.join(self.dir, "secret")
        with open(os.open(secret, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            file.write(os.urandom(32))
        return self

    def space(self, name):
        full = f"{self.tag}{name}"
        ip("netns", "add", full)
        self.spaces.append(full)
        return full

    def start(self, host, role, name, *args, secret="secret"):
        log_path = os.path.join(self.dir, f"{name}.log")
        # Namespaces share memory with each other, which hosts do not: tcp is what they would have.
        env = {**os.environ, "UCX_TLS": "tcp", "UCX_MEM_EVENTS": "n"}
        with open(log_path, "wb") as log:
            self.processes[name] = subprocess.Popen(
                ["ip", "netns", "exec", f"{self.tag}{host}", os.path.join(self.bin, f"tandem-{role}"),
                 "--cluster-secret-file", os.path.join(self.dir, secret), *args],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env)

    def node(self, host, number, role, name, *args, **more):
        self.start(host, role, name, "--id", name, "--router", "tcp://10.77.0.1:5570", "--listen",
                   f"tcp://10.77.0.{number}:*", "--advertise", f"10.77.0.{number}", *args, **more)

    def log(self, name):
        with open(os.path.join(self.dir, f"{name}.log"), encoding="utf-8") as file:
            return file.read()

    def curl(self, path, body=None):
        command = ["ip", "netns", "exec", f"{self.tag}a", "curl", "-s", "--noproxy", "*", "-m", "60",
                   f"http://10.77.0.1:8000{path}"]
        if body is not None:
            command += ["-d", json.dumps(body)]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    def __exit__(self, kind, *_):
        if kind is not None:
            for name in self.processes:
                print(f"--- {name}\n{self.log(name)[-1500:]}")
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.dir, ignore_errors=True)
        for name in self.spaces:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def start_all(hosts):
    hosts.start("a", "router", "router", "--model", MODEL, "--http", "0.0.0.0:8000", "--listen",
                "tcp://10.77.0.1:5570", "--advertise", "10.77.0.1", "--allow-placement")
    hosts.node("a", 1, "kvstore", "kvstore-1", "--capacity", "64M")
    hosts.node("b", 2, "prefill", "prefill-1", "--model", MODEL, "--kv-memory", "64M")
    hosts.node("c", 3, "decode", "decode-1", "--model", MODEL, "--kv-memory", "64M")
    wait_until(lambda: "ready" in hosts.curl("/ready") and "not" not in hosts.curl("/ready"), 60,
               "a cluster over three hosts")


@test
def test_three_hosts_serve_over_curve_and_tcp(options):
    with Hosts(options) as hosts:
        start_all(hosts)
        body = {"prompt": "The three hosts said to each other that " * 6, "max_tokens": 24,
                "temperature": 0}
        first = json.loads(hosts.curl("/v1/completions", body))
        again = json.loads(hosts.curl("/v1/completions", body))
        assert first["usage"]["completion_tokens"] == 24
        assert again["choices"] == first["choices"]
        assert again["tandem"]["logits_xxh"] == first["tandem"]["logits_xxh"]
        assert "carrier=tcp" in hosts.log("decode-1") and "carrier=shm" not in hosts.log("decode-1")
        # A process with another secret is not part of it, and harms nobody.
        with open(os.open(os.path.join(hosts.dir, "other"), os.O_WRONLY | os.O_CREAT, 0o600),
                  "wb") as file:
            file.write(os.urandom(32))
        hosts.node("b", 2, "prefill", "stranger", "--model", MODEL, "--kv-memory", "64M",
                   secret="other")
        wait_until(lambda: "process up" in hosts.log("stranger"), 30, "the stranger is up")
        third = json.loads(hosts.curl("/v1/completions", body))
        assert third["choices"] == first["choices"]
        assert "stranger" not in hosts.curl("/status")


@test
def test_a_cut_link_is_noticed_and_answered(options):
    with Hosts(options) as hosts:
        start_all(hosts)
        hub = f"{hosts.tag}hub"
        body = {"prompt": "word " * 600, "max_tokens": 4, "temperature": 0}
        assert "choices" in hosts.curl("/v1/completions", body)
        ip("-n", hub, "link", "set", "hb", "down")  # no packet, no reset: nothing that TCP would tell
        started = time.monotonic()
        reply = json.loads(hosts.curl("/v1/completions", {**body, "prompt": "other " * 600}))
        assert "error" in reply, reply
        assert time.monotonic() - started < 10
        ip("-n", hub, "link", "set", "hb", "up")
        wait_until(lambda: "choices" in hosts.curl("/v1/completions", body), 30,
                   "everybody is back")


if __name__ == "__main__":
    main(__doc__)
