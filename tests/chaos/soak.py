"""make soak MINUTES=N [SEED=S]: a whole cluster under mixed load while faults come by seed, and whether
anything is wrong, double, left behind or growing at the end. Prints a table, writes JSON to build/soak.

What must hold: each answer is the undisturbed one, what a client got that went away is the beginning of
it; an error only for who nobody could serve (all of a role gone), and a connection that breaks only with
the router it was to; at rest nobody holds anything; processes that lived all the time have the memory,
descriptors and threads that they had after a warm-up.

One process of each role lives all the time: it is frozen and drained as the others are, not ended."""
import argparse
import collections
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from cluster import ROOT, Cluster, wait_until
from faults import DECODE_STEPS, PREFILL_STEPS, STORE_STEPS
from load import ROUTERS, Broken, Refused, ask, check_at_rest

CLIENTS = 6
SALTS = 4
GONE_PERCENT = 15  # of streams: their clients go away
WELL_S = 3.0  # after a fault, until what it broke is over for requests, too
GAP_S = (1.0, 4.0)  # between faults
PROGRESS_S = 10
NOBODY_S = 0.2  # until a client asks again that nobody could serve
FROZEN_S = (0.4, 1.5, 3.0, 6.0)  # below and above a node's silence (2 s) and a ticket's lease (5 s)
TENANTS = {"sk-soak-a": "name=a weight=3", "sk-soak-b": "name=b", "sk-soak-c": "name=c"}
STEPS = {"prefill": PREFILL_STEPS, "decode": DECODE_STEPS, "kvstore": STORE_STEPS}
# Memory of its own (RssAnon): pools and tables are there from the start; what still grows is bounded:
# the heap's high-water marks, the router's index (48 bytes a block), remembered answers.
MEMORY_SLACK_BYTES = 8 << 20
MEMORY_SLACK_PERCENT = 5
# A connection to a process that had not been spoken with at the warm-up, and its pool, mapped. What were
# left of each life of a peer would be more after some faults.
DESCRIPTORS_FOR_A_PEER = 1
MAPPINGS_FOR_A_PEER = 1

SENTENCE = "The harbour master wrote down every ship, and each of them had a name. "
COPY = ("The Anna carried salt. The Berta carried coal. The Clara carried wine. The Dora carried tea. " * 2
        + "\nRepeat the text above, word for word:\nThe Anna")


def chat(*turns):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]


def requests():
    """name -> body. What they give depends on nothing else."""
    greedy, drawn = {"temperature": 0}, {"temperature": 0.8}
    made = {
        "chat stream": {"messages": chat("Why is the sky blue?"), "max_tokens": 40, "stream": True,
                        **greedy},
        "chat whole": {"messages": chat("Name three rivers."), "max_tokens": 30, "n": 2, "seed": 3,
                       "logprobs": True, "top_logprobs": 2, **drawn},
        "chat turn": {"messages": chat("Who was it? " + SENTENCE * 6, "The harbour master.",
                                       "And what was written down?"), "max_tokens": 30, "stream": True,
                      "seed": 4, **drawn},
        "short": {"prompt": "Once upon a time", "max_tokens": 24, "stream": True, **greedy},
        "first token": {"prompt": SENTENCE, "max_tokens": 1, **greedy},
        "choices": {"prompt": SENTENCE * 4, "max_tokens": 30, "n": 3, "seed": 5, "logprobs": 1, **drawn},
        "choices stream": {"prompt": SENTENCE * 3, "max_tokens": 40, "n": 2, "seed": 6, "stream": True,
                           **drawn},
        "logprobs": {"prompt": SENTENCE * 5, "max_tokens": 40, "logprobs": 4, "stream": True, **greedy},
        "stop": {"prompt": SENTENCE * 3, "max_tokens": 60, "stop": [" the", "and"], "min_tokens": 6,
                 "seed": 7, **drawn},
        "stop stream": {"prompt": SENTENCE * 3, "max_tokens": 60, "stop": ["."], "n": 2, "seed": 8,
                        "stream": True, **drawn},
        "own end": {"messages": chat("Say hello."), "max_tokens": 60, "ignore_eos": False, **greedy},
        "penalties": {"prompt": SENTENCE, "max_tokens": 40, "repetition_penalty": 1.2, "seed": 9,
                      "frequency_penalty": 0.5, "logit_bias": {"28": 4}, "stream": True, **drawn},
        "echo": {"prompt": "Hi", "max_tokens": 20, "echo": True, **greedy},
        "long": {"prompt": SENTENCE * 50, "max_tokens": 16, **greedy},
        "long stream": {"prompt": "Listen. " + SENTENCE * 40, "max_tokens": 120, "stream": True,
                        "seed": 10, **drawn},
    }
    for drafter in ("none", "prompt_lookup", "memo", "early_exit", "lookahead", "auto"):
        made[f"drafts {drafter}"] = {"prompt": COPY, "max_tokens": 60, "stream": drafter != "memo",
                                     "speculation": {"drafter": drafter}, **greedy}
    return made


def is_beginning(part, full):
    """Of choices: whether a client that went away had seen only what the answer begins with."""
    return all(index in full and full[index]["text"].startswith(got["text"]) and
               full[index]["tokens"][:len(got["tokens"])] == got["tokens"] and
               full[index]["hashes"][:len(got["hashes"])] == got["hashes"]
               for index, got in part.items())


# --- what will happen -----------------------------------------------------------------------------


def plan_of(seed, ids_of):
    """survivors, and without end (pause before, fault, target, how): the same for the same seed."""
    draw = random.Random(seed)
    survivors = {role: draw.choice(ids) for role, ids in ids_of.items()}
    return survivors, faults_of(draw, ids_of, survivors)


def faults_of(draw, ids_of, survivors):
    mortal = {role: [i for i in ids if i != survivors[role]] for role, ids in ids_of.items()}
    roles = list(ids_of)
    while True:
        fault = draw.choice(("kill", "kill", "end", "freeze", "freeze", "step", "step", "drain", "pin",
                             "evict", "role", "etcd"))
        role, target, how = draw.choice(roles), None, None
        if fault in ("kill", "end"):
            target, how = draw.choice(mortal[role]), draw.choice((0, 0, 1.5, 4.0))
        elif fault == "freeze":
            target, how = draw.choice(ids_of[role]), draw.choice(FROZEN_S)
        elif fault == "step":
            role = draw.choice([r for r in roles if r in STEPS])
            target = draw.choice(mortal[role])
            how = f"{draw.choice(STEPS[role]).partition(':')[0]}:{draw.choice(('kill', 'stop'))}:" \
                  f"{draw.randrange(1, 8)}"
        elif fault == "drain":
            target, how = draw.choice(ids_of["prefill"] + ids_of["decode"]), draw.choice((0.5, 2.0))
        elif fault in ("pin", "evict"):
            target = str(draw.randrange(SALTS))
        elif fault == "role":
            target, how = draw.choice(("prefill", "decode")), 2.5
        elif fault == "etcd":
            target, how = "etcd", draw.choice(("kill", "freeze"))
        yield round(draw.uniform(*GAP_S), 1), fault, target, how


# --- times at which something may fail ------------------------------------------------------------


class Windows:
    """Of whom: from when to when requests may notice it. Times of the monotonic clock."""

    def __init__(self):
        self.spans = collections.defaultdict(list)
        self._lock = threading.Lock()

    def open(self, whom):
        with self._lock:
            self.spans[whom].append([time.monotonic(), None])

    def close(self, whom):
        with self._lock:
            self.spans[whom][-1][1] = time.monotonic() + WELL_S

    def cover(self, whom, begin, end):
        with self._lock:
            return any(since <= end and (until is None or begin <= until)
                       for since, until in self.spans[whom])


# --- the run --------------------------------------------------------------------------------------


class Soak:
    def __init__(self, options, seed, seconds, carrier="shm", say=print):
        self.keys = tempfile.NamedTemporaryFile("w", suffix=".keys")  # mode 0600
        self.keys.write("".join(f"{key} {limits}\n" for key, limits in TENANTS.items()))
        self.keys.flush()
        self.cluster = Cluster(
            options.bin, routers=2, prefill=2, decode=3, kvstore=3, etcd=True, threads=1,
            kv_memory="128M", self_prefill=128, http_timeout_s=120,
            env={"UCX_TLS": "tcp"} if carrier == "tcp" else None,
            kvstore_args=["--capacity", "64M", "--replicas", "2", "--leader-lease-ms", "2000"],
            router_args=["--allow-placement", "--queue-ms", "60000", "--drain-ms", "15000",
                         "--api-key-file", self.keys.name])
        self.seed = seed
        self.seconds = seconds
        self.carrier = carrier
        self.say = say
        self.requests = requests()
        self.expected = {}
        self.windows = Windows()
        self.counts = collections.Counter()
        self.kinds = collections.Counter()
        self.wrong = []
        self.faults_done = []
        self.lock = threading.Lock()
        self.ending = threading.Event()
        self.go = threading.Event()  # cleared: clients pause between requests
        self.busy = 0  # clients that do not
        self.pinned = set()
        self.drained = set()
        self.frozen = set()
        self.samples = []
        self.survivors = {}
        self.started = 0.0

    # --- clients ----------------------------------------------------------------------------------

    def count(self, what, number=1):
        with self.lock:
            self.counts[what] += number

    def note_wrong(self, what):
        with self.lock:
            self.wrong.append(what[:3000])
        self.say(f"    WRONG {what[:600]}")

    def ask(self, router, name, salt, key, on_event=None):
        body = {"ignore_eos": True, "cache_salt": salt, **self.requests[name]}
        return ask(self.cluster, router, body, elsewhere=(503,), on_event=on_event,
                   headers={"Authorization": f"Bearer {key}"})

    def learn(self):
        """Undisturbed answers. Drafters must not show: what asks the same gets the same."""
        keys = list(TENANTS)
        for number, name in enumerate(self.requests):
            self.expected[name] = self.ask(ROUTERS[number % 2], name, "clean", keys[number % 3])
        drafts = [self.expected[name] for name in self.requests if name.startswith("drafts ") and
                  self.requests[name]["stream"]]
        assert all(each == drafts[0] for each in drafts), "an answer depends on its drafter"

    def client(self, number):
        draw = random.Random(self.seed * 1000 + number)
        names = list(self.requests)
        while not self.ending.is_set():
            if not self.go.is_set():
                with self.lock:
                    self.busy -= 1
                self.go.wait()
                with self.lock:
                    self.busy += 1
                continue
            name = draw.choice(names)
            salt, key = f"load{draw.randrange(SALTS)}", draw.choice(list(TENANTS))
            leaves_at = draw.randrange(1, 20) if draw.randrange(100) < GONE_PERCENT else None
            self.one(number, name, salt, key, leaves_at if self.requests[name].get("stream") else None)

    def one(self, number, name, salt, key, leaves_at):
        """A request, at the other router again where its own falls."""
        for turn in range(10000):
            router = ROUTERS[(number + turn) % 2]
            began = time.monotonic()
            on_event = (lambda count: count >= leaves_at) if leaves_at else None
            try:
                got = self.ask(router, name, salt, key, on_event)
                break
            except Broken as why:
                if self.windows.cover("nobody", began, time.monotonic()):
                    self.count("nobody could serve")
                    self.ending.wait(NOBODY_S)
                    return
                self.count("asked the other router")
                if not self.windows.cover(router, began, time.monotonic()):
                    self.note_wrong(f"{router} broke off, though it was well: {name}: {why}")
                time.sleep(0.02)
            except Refused as why:
                if self.windows.cover("nobody", began, time.monotonic()):
                    self.count("nobody could serve")
                    self.ending.wait(NOBODY_S)
                else:
                    self.note_wrong(f"an error, though somebody could serve: {name} of {router}, "
                                    f"after {time.monotonic() - began:.1f} s: {why}")
                return
            except Exception as why:  # whatever it is, a client does not expect it
                self.note_wrong(f"{name} of {router}, after {time.monotonic() - began:.1f} s: {why!r}")
                return
        choices, tokens = self.expected[name]
        if got[1] is None:  # it went away
            self.count("went away")
            if not is_beginning(got[0], choices):
                self.note_wrong(f"{name}: {got[0]} is no beginning of {choices}")
        elif got != (choices, tokens):
            self.note_wrong(f"{name} of {router}: {got} instead of {choices}, {tokens}")
        self.count("answers")
        with self.lock:
            self.kinds[name] += 1

    # --- faults -----------------------------------------------------------------------------------

    def ctl(self, router, *args):
        """tandemctl's exit code: 3 where a frozen or dead router does not answer."""
        keys = os.path.join(self.cluster.run_dir, "admin" if router == "router" else f"admin-{router}")
        return subprocess.run([os.path.join(self.cluster.bin, "tandemctl"), "--keys", keys, *args],
                              stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL, check=False, timeout=30).returncode

    def ctl_all(self, *args):
        for router in ROUTERS:
            self.counts[f"tandemctl {args[0]}"] += 1
            code = self.ctl(router, *args)
            # 1: the store had just no master, or not such a block.
            if code not in (0, 1) or (code == 1 and args[0] in ("drain", "undrain")):
                self.note_wrong(f"tandemctl {' '.join(args)} at {router}: exit code {code}")

    def back(self, process_id, command):
        if self.cluster.alive(process_id):
            self.cluster.kill(process_id)
            wait_until(lambda: not self.cluster.alive(process_id), 20, f"{process_id} has ended")
        self.cluster.start(process_id, command)

    def freeze(self, process_id):
        self.cluster.kill(process_id, signal.SIGSTOP)
        self.frozen.add(process_id)

    def wake(self, process_id):
        self.cluster.kill(process_id, signal.SIGCONT)
        self.frozen.discard(process_id)

    def fault_kill(self, target, how, sig=signal.SIGKILL):
        command = self.cluster.end(target, sig)
        self.ending.wait(how)
        self.cluster.start(target, command)

    def fault_end(self, target, how):
        self.fault_kill(target, how, signal.SIGTERM)

    def fault_freeze(self, target, how):
        self.freeze(target)
        self.ending.wait(how)
        self.wake(target)

    def fault_step(self, target, how):
        c = self.cluster
        command = c.end(target, signal.SIGTERM)
        c.start(target, command + ["--fault", how])

        def fallen():
            try:
                with open(f"/proc/{c.processes[target]['pid']}/stat", encoding="utf-8") as file:
                    return file.read().rsplit(")", 1)[1].split()[0] in "TZX"
            except (FileNotFoundError, ProcessLookupError):
                return True

        try:
            wait_until(lambda: fallen() or self.ending.is_set(), 12, "it falls at the step")
            self.count("fell at a step", fallen())
            self.ending.wait(2.5)  # so that its silence is noticed
        except AssertionError:
            pass  # nothing came by there
        self.back(target, command)

    def fault_drain(self, target, how):
        self.drained.add(target)
        self.ctl_all("drain", target)
        self.ending.wait(how)
        self.ctl_all("undrain", target)
        self.drained.discard(target)

    def fault_pin(self, target, how):
        del how
        words = ("--prompt", SENTENCE * 5, "--salt", f"load{target}")
        self.pinned.add(words)
        self.ctl_all("pin", *words)

    def fault_evict(self, target, how):
        del how
        self.ctl_all("evict", "--prompt", SENTENCE * 4, "--salt", f"load{target}")

    def fault_role(self, target, how):
        """All of a role at once: the one that lives is frozen, the others are killed."""
        self.windows.open("nobody")
        ids = self.cluster.ids(target)
        commands = {i: self.cluster.end(i) for i in ids if i != self.survivors[target]}
        self.freeze(self.survivors[target])
        self.ending.wait(how)
        self.wake(self.survivors[target])
        for process_id, command in commands.items():
            self.cluster.start(process_id, command)

    def fault_etcd(self, target, how):
        if how == "freeze":
            self.fault_freeze(target, 3.0)
        else:
            self.fault_kill(target, 1.5)

    def strike(self, fault, target, how):
        """One fault, until all are well again."""
        if target in ROUTERS:
            self.windows.open(target)
        try:
            getattr(self, f"fault_{fault}")(target, how)
            self.cluster.wait_known()
        finally:
            if target in ROUTERS:
                self.windows.close(target)
            if fault == "role":
                self.windows.close("nobody")

    def run_faults(self, faults, until):
        """One after the other, each once the one before is over; a fault that began is ended."""
        while True:
            pause, fault, target, how = next(faults)
            if self.ending.wait(min(pause, max(0.0, until - time.monotonic()))) or \
                    time.monotonic() >= until:
                return
            self.count(f"fault {fault}")
            self.faults_done.append({"at_s": round(time.monotonic() - self.started, 1),
                                     "fault": fault, "target": target, "how": how})
            self.strike(fault, target, how)
            self.faults_done[-1]["over_s"] = round(time.monotonic() - self.started, 1)

    def progress(self):
        """A line now and then, until the end."""
        while not self.ending.wait(PROGRESS_S):
            left = max(0, int(self.seconds - (time.monotonic() - self.started)))
            last = self.faults_done[-1] if self.faults_done else {"fault": "-", "target": ""}
            self.say(f"    {left // 60}:{left % 60:02d} left, {self.counts['answers']} answers, "
                     f"{self.counts['went away']} of clients that went away, "
                     f"{len(self.faults_done)} faults (last: {last['fault']} {last['target']}), "
                     f"{self.counts['nobody could serve']} that nobody could serve, "
                     f"{len(self.wrong)} wrong")

    # --- at rest ----------------------------------------------------------------------------------

    def pause(self):
        """Until nobody asks and nobody holds anything."""
        self.go.clear()
        try:
            wait_until(lambda: self.busy == 0, 150, "clients pause")
            check_at_rest(self.cluster)
        except AssertionError as why:
            self.note_wrong(str(why))

    def sample(self):
        """Memory, descriptors and threads of all processes."""
        taken = {}
        for process_id, pid in self.cluster.pids().items():
            with open(f"/proc/{pid}/status", encoding="utf-8") as file:
                status = dict(line.split(":", 1) for line in file)
            kinds = collections.Counter()
            for number in os.listdir(f"/proc/{pid}/fd"):
                try:
                    kinds[os.readlink(f"/proc/{pid}/fd/{number}").partition(":")[0]] += 1
                except FileNotFoundError:
                    pass
            with open(f"/proc/{pid}/maps", encoding="utf-8") as file:
                shared = sum("/SYSV" in line or "/dev/shm/" in line for line in file)
            memory = {name: int(status[name].split()[0]) << 10 for name in ("RssAnon", "VmRSS")}
            taken[process_id] = {"pid": pid, "memory": memory["RssAnon"],
                                 "resident": memory["VmRSS"], "mappings": shared,
                                 "threads": int(status["Threads"]), "descriptors": sum(kinds.values()),
                                 "sockets": kinds["socket"]}
        self.samples.append(taken)

    def growth(self):
        """(rows of a table, what has grown) of processes that lived from the warm-up to the end."""
        first, last = self.samples[0], self.samples[-1]
        peers = len(self.cluster.processes) - 1
        rows, grown = [], []
        for process_id, before in first.items():
            after = last[process_id]
            if after["pid"] != before["pid"] or process_id == "etcd":
                continue
            limits = {"memory": max(MEMORY_SLACK_BYTES,
                                    before["memory"] * MEMORY_SLACK_PERCENT // 100),
                      "threads": 0, "descriptors": DESCRIPTORS_FOR_A_PEER * peers,
                      "mappings": MAPPINGS_FOR_A_PEER * peers}
            rows.append((process_id, before, after))
            grown += [f"{process_id}: {what} {before[what]} -> {after[what]}, {slack} are allowed"
                      for what, slack in limits.items() if after[what] > before[what] + slack]
        return rows, grown

    def check_end(self):
        """What is wrong once all is over, in words."""
        rows, grown = self.growth()
        lived = {process_id for process_id, _, _ in rows}
        found = grown + [f"{i} has not lived all the time" for i in self.survivors.values()
                          if i not in lived]
        if not self.counts["answers"]:
            found.append("no answer at all")
        return rows, found

    # --- all of it --------------------------------------------------------------------------------

    def run(self):
        """The report."""
        c = self.cluster
        ids_of = {role: c.ids(role) for role in ("router", "prefill", "decode", "kvstore")}
        self.survivors, faults = plan_of(self.seed, ids_of)
        self.say(f"    seed {self.seed}, {self.seconds} s, {self.carrier}, living all the time: "
                 f"{', '.join(self.survivors.values())}")
        self.learn()
        self.started = time.monotonic()
        until = self.started + self.seconds
        warm_s = min(60.0, self.seconds / 4)
        self.busy = CLIENTS
        self.go.set()
        clients = [threading.Thread(target=self.client, args=(number,)) for number in range(CLIENTS)]
        clients.append(threading.Thread(target=self.progress))
        for thread in clients:
            thread.start()
        try:
            self.run_faults(faults, self.started + warm_s)
            self.pause()
            self.sample()
            self.go.set()
            self.run_faults(faults, until)
        except (AssertionError, OSError, RuntimeError, subprocess.SubprocessError) as why:
            self.note_wrong(f"after {self.faults_done[-1:]}: {why!r}")
        finally:
            self.ending.set()
            self.go.set()
            for process_id in list(self.frozen):
                self.wake(process_id)
            for thread in clients:
                thread.join()
        self.busy = 0
        for words in self.pinned:
            self.ctl_all("unpin", *words)
        self.pause()
        self.sample()
        rows, found = self.check_end()
        return {"seed": self.seed, "seconds": self.seconds, "carrier": self.carrier,
                "clients": CLIENTS, "survivors": self.survivors,
                "faults": self.faults_done, "counts": dict(self.counts), "kinds": dict(self.kinds),
                "processes": {process_id: {"warm": before, "end": after}
                              for process_id, before, after in rows},
                "wrong": self.wrong + found}


def table(report):
    """For people."""
    columns = ("memory", "resident", "mappings", "descriptors", "threads")
    lines = ["    from the warm-up to the end, memory in MiB",
             f"    {'process':<12}" + "".join(f"{name:>18}" for name in columns)]
    for process_id, each in report["processes"].items():
        cells = []
        for name in columns:
            values = (each["warm"][name], each["end"][name])
            in_mib = name in ("memory", "resident")
            cells.append(" -> ".join(f"{value / 2**20:.1f}" if in_mib else str(value)
                                     for value in values))
        lines.append(f"    {process_id:<12}" + "".join(f"{cell:>18}" for cell in cells))
    lines += [f"    {count:>7} {what}" for what, count in sorted(report["counts"].items())]
    lines += [f"    {count:>7} {what}" for what, count in sorted(report["kinds"].items())]
    lines += [f"    WRONG {what[:1000]}" for what in report["wrong"][:20]]
    return "\n".join(lines)


def run_soak(options, seed, seconds, carrier="shm", say=lambda text: print(text, flush=True)):
    """One run; the report, of which "wrong" should be empty."""
    soak = Soak(options, seed, seconds, carrier, say)
    with soak.keys, soak.cluster:
        report = soak.run()
        say(table(report))
        assert not report["wrong"], f"seed {seed}: {len(report['wrong'])} wrong"
    return report


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", default="build/test/bin", help="folder of the programs")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0, help="0: any; it is printed")
    parser.add_argument("--carrier", choices=("shm", "tcp"), default="shm")
    parser.add_argument("--out", default=os.path.join(ROOT, "build", "soak"))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the cluster is stopped
    seed = options.seed or random.SystemRandom().randrange(1, 1 << 31)
    soak = Soak(options, seed, int(options.minutes * 60), options.carrier,
                lambda text: print(text, flush=True))
    with soak.keys, soak.cluster:
        report = soak.run()
        if report["wrong"]:
            soak.cluster.print_logs()
    os.makedirs(options.out, exist_ok=True)
    path = os.path.join(options.out, f"seed-{seed}.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(report, file, indent=1)
    print(table(report))
    print(f"    report: {os.path.relpath(path)}")
    print(f"{'FAILED' if report['wrong'] else 'passed'}: seed {seed}, {report['seconds']} s, "
          f"{report['counts'].get('answers', 0)} answers, {len(report['faults'])} faults, "
          f"{len(report['wrong'])} wrong")
    return 1 if report["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
