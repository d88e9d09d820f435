"""Hosts for tests: each a network namespace with an address of its own, all on one bridge. Their links
can be cut and slowed, and two groups of hosts can be parted from each other.

Namespaces have no names here: they live while somebody in them lives, or holds them open, and who was
started in them ends with this process. So nothing is left behind, even where that is killed."""
import contextlib
import ctypes
import http.client
import os
import signal
import subprocess
import threading
import time

from cluster import MODEL, Cluster, Skip, wait_until

CLONE_NEWNET = 0x40000000
OWN = "/proc/thread-self/ns/net"
NOBODY = "02:00:00:00:00:01"  # no host has it: what is sent there is lost without a word
HTTP_PORT = 8000
BUS_PORT = 5570
ETCD_PORT, ETCD_PEER_PORT = 2379, 2380
# UCX looks for network devices in /sys, which shows those of who has mounted it.
AT_HOME = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "sh", "-c",
           'mount -t sysfs none /sys && exec "$@"', "sh"]
_libc = ctypes.CDLL(None, use_errno=True)


def _check(code):
    if code != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class Space:
    """A network namespace. A thread that enters it takes those along that it starts there."""

    def __init__(self):
        made = []

        def make():
            try:
                _check(_libc.unshare(CLONE_NEWNET))
                made.append(os.open(OWN, os.O_RDONLY))
            except OSError as why:
                made.append(why)

        thread = threading.Thread(target=make)  # so that nobody else moves
        thread.start()
        thread.join()
        if isinstance(made[0], OSError):
            raise Skip(f"network namespaces cannot be made here: {made[0]}")
        self.fd = made[0]
        self.run("ip", "link", "set", "lo", "up")

    @property
    def path(self):
        """For ip's `netns`."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def enter(self):
        _check(_libc.setns(self.fd, CLONE_NEWNET))

    @contextlib.contextmanager
    def inside(self):
        before = os.open(OWN, os.O_RDONLY)
        self.enter()
        try:
            yield
        finally:
            _check(_libc.setns(before, CLONE_NEWNET))
            os.close(before)

    def run(self, *command):
        with self.inside():
            subprocess.run(command, check=True, capture_output=True)

    def start(self, command, log, env):
        """A process that ends when this one does."""
        with self.inside():
            return subprocess.Popen([*AT_HOME, *command], stdin=subprocess.DEVNULL, stdout=log,
                                    stderr=log, env=env, start_new_session=True)

    def close(self):
        os.close(self.fd)


class Host(Space):
    """One of a network's."""

    def __init__(self, hub, number):
        super().__init__()
        self.hub = hub
        self.address = f"10.77.0.{number}"
        self.link = f"v{number}"
        self.port = f"h{number}"  # its end at the bridge
        self.run("ip", "link", "add", self.link, "type", "veth", "peer", "name", self.port, "netns",
                 hub.path)
        hub.run("ip", "link", "set", self.port, "master", "br0", "up")
        self.run("ip", "addr", "add", f"{self.address}/24", "dev", self.link)
        self.run("ip", "link", "set", self.link, "up")

    def cut(self):
        """No packet and no reset: nothing that TCP would tell."""
        self.hub.run("ip", "link", "set", self.port, "down")

    def mend(self):
        self.hub.run("ip", "link", "set", self.port, "up")

    def slow(self, rate):
        """What it sends, as `tc` says rates."""
        self.run("tc", "qdisc", "replace", "dev", self.link, "root", "tbf", "rate", rate, "burst",
                 "64kb", "latency", "300ms")

    def hasten(self):
        self.run("tc", "qdisc", "del", "dev", self.link, "root")

    def shun(self, others):
        for other in others:
            self.run("ip", "neigh", "replace", other.address, "lladdr", NOBODY, "dev", self.link,
                     "nud", "permanent")

    def meet(self, others):
        for other in others:
            self.run("ip", "neigh", "del", other.address, "dev", self.link)


class Network:
    """A bridge, and hosts 10.77.0.1 to .254 on it, by name."""

    def __init__(self):
        self.hosts = {}
        self.hub = None
        self.count = 0
        try:
            self.hub = Space()
            self.hub.run("ip", "link", "add", "br0", "type", "bridge")
            self.hub.run("ip", "link", "set", "br0", "up")
        except (subprocess.CalledProcessError, FileNotFoundError) as why:
            self.close()
            raise Skip(f"no network can be made here: {why}") from why

    def add(self, name):
        self.count += 1
        self.hosts[name] = Host(self.hub, self.count)
        return self.hosts[name]

    def remove(self, name):
        """Its end at the bridge goes with it."""
        self.hosts.pop(name).close()

    def part(self, some, others):
        """The ones and the others do not hear each other any more; all else they do."""
        some, others = ([self.hosts[name] for name in names] for names in (some, others))
        for ones, rest in ((some, others), (others, some)):
            for host in ones:
                host.shun(rest)

    def unite(self, some, others):
        some, others = ([self.hosts[name] for name in names] for names in (some, others))
        for ones, rest in ((some, others), (others, some)):
            for host in ones:
                host.meet(rest)

    def close(self):
        for host in self.hosts.values():
            host.close()
        self.hosts = {}
        if self.hub is not None:
            self.hub.close()


class HostCluster(Cluster):
    """Each process on a host of its own; this thread, and those it starts, are on one more.

    args: {role: flags}. What Cluster does with processes and HTTP works here as well."""

    def __init__(self, options, routers=1, prefill=1, decode=1, kvstore=1, etcd=0, args=None):
        super().__init__(options.bin, env={"UCX_TLS": "tcp"})  # hosts share no memory; namespaces do
        self.counts = {"etcd": etcd, "router": routers, "kvstore": kvstore, "prefill": prefill,
                       "decode": decode}
        self.args = args or {}
        self.network = None
        self.outside = None  # where this thread was before
        self.running = {}  # id -> Popen
        self.commands = {}

    # --- life -------------------------------------------------------------------------------------

    def __enter__(self):
        try:
            os.mkdir(self.run_dir)
            secret = os.path.join(self.run_dir, "cluster.secret")
            with open(os.open(secret, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
                file.write(os.urandom(32))
            self.network = Network()
            self.outside = os.open(OWN, os.O_RDONLY)
            self.network.add("clients").enter()
            ids = {role: [f"{role}-{i}" if i > 1 or role != "router" else role
                          for i in range(1, count + 1)] for role, count in self.counts.items()}
            for role, names in ids.items():
                for name in names:
                    self.place(role, name)
            for role in self.counts:
                for name in ids[role]:
                    self.launch(name)
            self.wait_known()
            if self.ids("etcd") and self.ids("kvstore"):
                wait_until(self.store_leader, 30, "a store leads")
        except BaseException:
            self.print_logs()
            self.down()
            self._remove()
            raise
        return self

    def down(self):
        # At once, but for sanitizers, which report at a process's end.
        sanitized = "san-" in self.bin
        for process in self.running.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM if sanitized else signal.SIGKILL)
                process.send_signal(signal.SIGCONT)
        deadline = time.monotonic() + (60 if sanitized else 8)
        for process in self.running.values():
            try:
                process.wait(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.running = {}
        if self.outside is not None:
            _check(_libc.setns(self.outside, CLONE_NEWNET))
            os.close(self.outside)
            self.outside = None
        if self.network is not None:
            self.network.close()
            self.network = None

    # --- processes --------------------------------------------------------------------------------

    def host(self, process_id):
        return self.network.hosts[process_id]

    def place(self, role, process_id):
        """A host for a process that is not started yet."""
        address = self.network.add(process_id).address
        port = ETCD_PORT if role == "etcd" else HTTP_PORT
        self.processes[process_id] = {"id": process_id, "role": role, "pid": 0,
                                      "http": f"{address}:{port}",
                                      "log": os.path.join(self.run_dir, f"{process_id}.log")}
        with open(self.processes[process_id]["log"], "ab"):
            pass

    def etcd_urls(self):
        return ",".join(f"http://{self.host(name).address}:{ETCD_PORT}" for name in self.ids("etcd"))

    def command_of(self, process_id):
        role = self.processes[process_id]["role"]
        address = self.host(process_id).address
        if role == "etcd":
            client, peer = (f"http://{address}:{port}" for port in (ETCD_PORT, ETCD_PEER_PORT))
            peers = ",".join(f"{name}=http://{self.host(name).address}:{ETCD_PEER_PORT}"
                             for name in self.ids("etcd"))
            return ["etcd", "--name", process_id, "--data-dir",
                    os.path.join(self.run_dir, f"{process_id}.data"), "--listen-client-urls", client,
                    "--advertise-client-urls", client, "--listen-peer-urls", peer,
                    "--initial-advertise-peer-urls", peer, "--initial-cluster", peers, "--log-level",
                    "warn"]
        command = [os.path.join(self.bin, f"tandem-{role}"), "--id", process_id, "--listen",
                   f"tcp://{address}:{BUS_PORT}", "--advertise", address, "--http",
                   f"{address}:{HTTP_PORT}", "--cluster-secret-file",
                   os.path.join(self.run_dir, "cluster.secret"), "--ready-file",
                   self.ready_file(process_id)]
        if self.ids("etcd"):
            command += ["--etcd", self.etcd_urls()]
        elif role != "router":
            command += ["--router", f"tcp://{self.host('router').address}:{BUS_PORT}"]
        if role != "kvstore":
            command += ["--model", MODEL]
        return command + list(self.args.get(role, ()))

    def ready_file(self, process_id):
        return os.path.join(self.run_dir, f"{process_id}.ready")

    def launch(self, process_id):
        """Starts it; start() also waits until it is up."""
        self.commands.setdefault(process_id, self.command_of(process_id))
        if os.path.exists(self.ready_file(process_id)):
            os.remove(self.ready_file(process_id))
        with open(self.processes[process_id]["log"], "ab") as log:
            process = self.host(process_id).start(self.commands[process_id], log, self.env)
        self.running[process_id] = process
        self.processes[process_id]["pid"] = process.pid

    def start(self, process_id, command=None):
        self.launch(process_id)
        if self.processes[process_id]["role"] != "etcd":
            ready = self.ready_file(process_id)
            wait_until(lambda: os.path.exists(ready) and os.path.getsize(ready) > 0, self.timeout_s,
                       f"{process_id} is ready")

    def end(self, process_id, sig=signal.SIGKILL):
        self.kill(process_id, sig)
        self.running[process_id].wait(timeout=self.timeout_s)
        return self.commands[process_id]

    def alive(self, process_id):
        process = self.running.get(process_id)
        return process is not None and process.poll() is None

    def add(self, role, process_id):
        """One more host, and its process."""
        self.place(role, process_id)
        self.start(process_id)

    def remove(self, process_id):
        """What is left of a process that has ended, and its host."""
        self.running.pop(process_id)
        self.processes.pop(process_id)
        self.commands.pop(process_id)
        self.network.remove(process_id)

    def lose(self, process_id):
        """A host is gone, as by a power cut: no process there says a word more, and no kernel does."""
        self.host(process_id).cut()
        self.end(process_id)

    def recover(self, process_id):
        self.host(process_id).mend()
        self.start(process_id)

    # --- who leads --------------------------------------------------------------------------------

    def etcd_leader(self):
        """The one that leads, by its own word; None while there is none."""
        for name in self.ids("etcd"):
            if self.alive(name):
                try:
                    status = self.etcd("/v3/maintenance/status", {}, to=name)
                except OSError:
                    continue
                if status.get("leader", "0") == status["header"]["member_id"]:
                    return name
        return None

    def store_leader(self):
        found = []
        for name in self.ids("kvstore"):
            try:
                if self.alive(name) and self.metrics(name)["tandem_kvstore_is_leader"] == 1:
                    found.append(name)
            except (OSError, http.client.HTTPException):
                continue
        assert len(found) < 2, found
        return found[0] if found else None
