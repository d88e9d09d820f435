"""Many clients put, look up, read and remove, while processes die and freeze by seed.

Each worker writes down what it did and read; histories.py says what that may have been."""
import json
import os
import random
import re
import signal
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import ROOT, Cluster, main, test, wait_until
from histories import History

MODEL = os.path.join(ROOT, "build/models/SmolLM2-135M-Instruct.Q4_1.gguf")
CODEC = "f4_e2m1"  # small blocks
WORKERS = 4
KEYS = 48
MASTER = "kvstore-1"
SEGMENTS = ("kvstore-2", "kvstore-3", "kvstore-4")
FROZEN_S = (0.3, 1.5, 3.5)  # below and above the time after which a silent process is dead


class Worker:
    """One client of the store, that can be killed and started again."""

    def __init__(self, cluster, number, shape):
        self.cluster = cluster
        self.number = number
        self.id = f"worker-{number}"
        self.history = os.path.join(cluster.run_dir, f"{self.id}.history")
        self.log_path = os.path.join(cluster.run_dir, f"{self.id}.log")
        self.ready = os.path.join(cluster.run_dir, f"{self.id}.ready")
        self.lives = 0
        self.command = [*cluster.joining("store_worker", self.id), "--model", MODEL, "--kv-codec",
                        CODEC, "--keys", str(KEYS), "--history", self.history, "--ready-file",
                        self.ready, *shape]
        self.process = None

    def start(self, seed):
        self.lives += 1
        if os.path.exists(self.ready):
            os.remove(self.ready)
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                self.command + ["--seed", str(seed * 1000 + self.number * 100 + self.lives)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.cluster.env)

    def text(self):
        try:
            with open(self.history, encoding="utf-8") as file:
                return file.read()
        except FileNotFoundError:
            return ""

    def log(self):
        with open(self.log_path, encoding="utf-8", errors="replace") as file:
            return file.read()


def shape_of(cluster):
    numerics = re.search(r"numerics=(\S+)", cluster.log("prefill-1")).group(1)
    block_bytes = re.search(r"block_bytes=(\d+)", cluster.log(SEGMENTS[0])).group(1)
    return ["--numerics", numerics, "--block-bytes", block_bytes]


FAULTS = ("kill segment", "freeze segment", "freeze segment", "kill worker", "freeze worker",
          "freeze worker", "kill master", "freeze master")


class Chaos:
    """Faults by seed, until their time is over; then everybody is well again."""

    def __init__(self, cluster, workers, seed, kinds, say):
        self.cluster = cluster
        self.workers = workers
        self.random = random.Random(seed)
        self.seed = seed
        self.kinds = kinds
        self.say = say
        self.frozen = []  # (until, pid)
        self.master_changes = []

    def freeze(self, pid):
        os.kill(pid, signal.SIGSTOP)
        self.frozen.append((time.monotonic() + self.random.choice(FROZEN_S), pid))

    def wake(self, everybody=False):
        for until, pid in list(self.frozen):
            if everybody or time.monotonic() >= until:
                os.kill(pid, signal.SIGCONT)
                if pid == self.cluster.processes[MASTER]["pid"]:
                    self.master_changes.append(time.monotonic_ns())
                self.frozen.remove((until, pid))

    def is_frozen(self, pid):
        return any(pid == each for _, each in self.frozen)

    def strike(self):
        what = self.random.choice(self.kinds)
        kind = what.split()[1]
        if kind == "worker":
            target = self.random.choice(self.workers)
            pid = target.process.pid
        else:
            target = MASTER if kind == "master" else self.random.choice(SEGMENTS)
            pid = self.cluster.processes[target]["pid"]
        if self.is_frozen(pid):
            return
        self.say(f"{what} {target if isinstance(target, str) else target.id}")
        if kind == "master":
            self.master_changes.append(time.monotonic_ns())
        if what.startswith("freeze"):
            self.freeze(pid)
        elif kind == "worker":
            target.process.kill()
            target.process.wait()
            target.start(self.seed)
        else:
            self.cluster.restart(target)
        if kind == "master":
            self.master_changes.append(time.monotonic_ns())

    def run(self, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.wake()
            self.strike()
            pause = time.monotonic() + self.random.uniform(0.1, 0.8)
            while time.monotonic() < pause:
                self.wake()
                time.sleep(0.02)
        self.wake(everybody=True)


def run_seed(options, seed, seconds, carrier="shm", kinds=FAULTS, store_args=(),
             say=lambda _: None):
    """One cluster, one order of faults. Raises AssertionError with what was wrong."""
    args = ("--lease-ms", "20", "--put-abandoned-ms", "1500", "--capacity", "8M", "--hot-hits",
            "2", *store_args)
    with Cluster(options.bin, prefill=1, decode=1, kvstore=1 + len(SEGMENTS), kv_codec=CODEC,
                 kv_memory="64M", kvstore_args=args, args_of={MASTER: ["--role", "master"]},
                 env={"UCX_TLS": "tcp"} if carrier == "tcp" else None) as c:
        workers = [Worker(c, i, shape_of(c)) for i in range(WORKERS)]
        chaos = Chaos(c, workers, seed, kinds, say)
        try:
            for worker in workers:
                worker.start(seed)
            wait_until(lambda: all("\nread " in w.text() for w in workers), 20, "workers read")
            chaos.run(seconds)
            marks = [len(w.text()) for w in workers]
            # Nobody is left waiting, and what is put now is read again.
            wait_until(lambda: all("\nread " in w.text()[mark:] and "\nend " in w.text()[mark:]
                                   for w, mark in zip(workers, marks)), 40,
                       "workers put and read again")
            for worker in workers:
                worker.process.terminate()
            for worker in workers:
                assert worker.process.wait(timeout=30) == 0, worker.log()[-2000:]
            check_nothing_left(c)
        except BaseException:
            for worker in workers:
                print(f"--- {worker.id}: {worker.log()[-1500:]}")
            raise
        finally:
            chaos.wake(everybody=True)
            for worker in workers:
                if worker.process is not None and worker.process.poll() is None:
                    worker.process.kill()
                    worker.process.wait()
        history = History()
        for worker in workers:
            history.add(worker.text(), worker.id)
        say(json.dumps(dict(history.counts)))
        faults = history.check(chaos.master_changes)
        assert not faults, f"seed {seed}: {len(faults)} wrong: " + "\n".join(faults[:10])
        return history


def check_nothing_left(c):
    """Once the writers are gone, what the segments hold is what the master knows."""
    seen = {}

    def agree():
        for segment in SEGMENTS:
            series = c.metrics(segment)
            seen[segment] = {state: int(series[f'tandem_kvstore_kv_blocks{{state="{state}"}}'])
                             for state in ("reserved", "cached", "active", "quarantined")}
        seen[MASTER] = int(c.metrics(MASTER)["tandem_kvstore_replicas"])
        counts = [seen[segment] for segment in SEGMENTS]
        return (not any(each["reserved"] or each["quarantined"] for each in counts) and
                sum(each["active"] + each["cached"] for each in counts) == seen[MASTER])

    try:
        wait_until(agree, 20, "segments hold what the master knows, and nothing else")
    except AssertionError as error:
        raise AssertionError(f"{error}: {seen}") from error


def show(text):
    print(f"    {text}", flush=True)


@test
def test_i7_store_histories_shm(options):
    """I7: entries are hints; nobody reads what its key's writer did not write."""
    run_seed(options, seed=1, seconds=12, say=show)


@test
def test_i7_store_histories_tcp(options):
    run_seed(options, seed=2, seconds=12, carrier="tcp", say=show)


if __name__ == "__main__":
    main(__doc__)
