#!/usr/bin/env python3
"""Runs every test: executables under <bin>/tests and Python tests under tests/.

One line for each file, the output of those that failed at the end, and last the line
"N passed, N failed". Exit code 1 on any failure, and when no test ran.

usage: tests/run.py [--bin DIR] [--san SANITIZERS] [--only TEXT] [--image] [-v]
"""
import argparse
import collections
import glob
import os
import re
import signal
import subprocess
import sys
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
UNIT_LIMIT_S = 120
SLOW_LIMIT_S = 300  # under sanitizers, and for whole-model tests
SLOW = re.compile(r"/test_(model|reference|cuda_model|cuda_reference)\b")
# Mostly wait, for deaths to be noticed: they run beside the others, one after the other.
WAITING = re.compile(r"^tests/chaos/|/test_(failover|drain|ha|hosts|cluster_hosts|routers)\.py$|/unit/coord/")
SCRIPT_LIMIT_S = 600
SCRIPT_SAN_LIMIT_S = 1800
OUTPUT_SHOWN_BYTES = 16384

RESULT = re.compile(r"^\[ *(OK|FAILED|SKIPPED) *\] *(.*)$")
CMOCKA_TOTAL = re.compile(r"^\[  PASSED  \] (\d+) test\(s\)\.")


class Outcome:
    """What one file reported."""

    def __init__(self, path):
        self.path = path
        self.passed = 0
        self.failed = []  # what went wrong, in words
        self.skipped = []
        self.output = ""
        self.seconds = 0.0


def environment(san):
    env = dict(os.environ)
    env["UCX_MEM_EVENTS"] = "n"  # UCX's malloc hooks and sanitizers do not go together
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    env["PYTHONUNBUFFERED"] = "1"

    def options(name, values, suppressions):
        path = os.path.join(ROOT, "tests", suppressions)
        if os.path.exists(path):
            values = f"{values}:suppressions={path}"
        env[name] = f"{values}:{env[name]}" if env.get(name) else values

    if san:
        options("ASAN_OPTIONS", "halt_on_error=1:abort_on_error=0:detect_leaks=1:"
                "strict_string_checks=1:allocator_may_return_null=1", "asan.supp")
        options("LSAN_OPTIONS", "print_suppressions=0", "lsan.supp")
        options("UBSAN_OPTIONS", "halt_on_error=1:print_stacktrace=1", "ubsan.supp")
        options("TSAN_OPTIONS", "halt_on_error=1:second_deadlock_stack=1:history_size=4",
                "tsan.supp")
    return env


_running = []  # processes of the lanes; list operations are atomic


def run(command, limit_s, env, live):
    """Runs in a process group of its own, so that a file over its limit leaves nothing behind.

    Returns (exit code or None for a timeout, output)."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               stdin=subprocess.DEVNULL, env=env, cwd=ROOT,
                               start_new_session=True)
    _running.append(process)
    chunks = []

    def read():
        for line in process.stdout:
            chunks.append(line)
            if live:
                sys.stdout.write(line.decode(errors="replace"))
                sys.stdout.flush()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        code = process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        code = None
    except (KeyboardInterrupt, SystemExit):
        interrupt(process)
        raise
    if code is None:
        interrupt(process)
    _running.remove(process)
    # A process that outlives its parent would hold the pipe open.
    reader.join(timeout=5)
    return code, b"".join(chunks).decode(errors="replace")


def interrupt(process):
    """SIGTERM lets Python tests stop their clusters; then SIGKILL to the whole group."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def judge(outcome, code, limit_s):
    total = 0
    for line in outcome.output.splitlines():
        match = RESULT.match(line)
        total = max(total, int(m.group(1)) if (m := CMOCKA_TOTAL.match(line)) else 0)
        if match is None:
            continue
        kind, name = match.groups()
        if kind == "OK":
            outcome.passed += 1
        elif kind == "SKIPPED" and not name[:1].isdigit():
            outcome.skipped.append(name)
        elif kind == "FAILED" and not re.match(r"\d+ test\(s\)", name):
            # cmocka names a failed test again in its summary.
            if name and name not in outcome.failed:
                outcome.failed.append(name)
    # Replayers and sweeps print no line for each test, only their total.
    outcome.passed = outcome.passed or total
    if code is None:
        outcome.failed.append(f"not done after {limit_s} s")
    elif code < 0:
        outcome.failed.append(f"ended by {signal.Signals(-code).name}")
    elif code != 0 and not outcome.failed:
        outcome.failed.append(f"exit code {code}")
    elif not outcome.passed and not outcome.failed and not outcome.skipped:
        outcome.failed.append("reported no test")


def test_files(args):
    """(path, command, limit in seconds) of every file, in running order."""
    found = []
    scripts = ["tests/e2e/reference.py"]
    folders = ("emu", "e2e", "clients", "chaos")
    patterns = ("unit/*/test_*", "fault/fault_*", "fuzz/fuzz_*")
    if args.image:
        scripts, folders, patterns = [], ("image",), ()
    for pattern in patterns:
        for path in sorted(glob.glob(os.path.join(args.bin, "tests", pattern))):
            if os.path.isfile(path) and os.access(path, os.X_OK) and not path.endswith(".o"):
                slow = args.san or SLOW.search(path)
                found.append((path, [os.path.abspath(path)],
                              SLOW_LIMIT_S if slow else UNIT_LIMIT_S))
    for folder in folders:
        scripts += sorted(glob.glob(f"tests/{folder}/test_*.py"))
    limit_s = SCRIPT_SAN_LIMIT_S if args.san else SCRIPT_LIMIT_S
    for path in scripts:
        if os.path.exists(path):
            found.append((path, [sys.executable, path, "--bin", args.bin], limit_s))
    return [entry for entry in found if args.only in entry[0]]


def report(outcomes):
    for outcome in outcomes:
        if outcome.failed:
            print(f"\n--- {outcome.path}: {'; '.join(outcome.failed)}")
            text = outcome.output
            if len(text) > OUTPUT_SHOWN_BYTES:
                print(f"... ({len(text) - OUTPUT_SHOWN_BYTES} characters before)")
            print(text[-OUTPUT_SHOWN_BYTES:].rstrip())
    skipped = [(o.path, name) for o in outcomes for name in o.skipped]
    passed = sum(o.passed for o in outcomes)
    failed = sum(len(o.failed) for o in outcomes)
    print()
    if failed:
        print("failed:")
        for outcome in outcomes:
            for name in outcome.failed:
                print(f"  {outcome.path}: {name}")
    if passed + failed == 0:
        print("error: no test ran (is everything built?)")
    for path, name in skipped:
        print(f"skipped: {path}: {name}")
    print(f"{len(skipped)} skipped")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or passed == 0 else 0


class Lanes:
    """Two files at a time: one that computes, and one that mostly waits."""

    def __init__(self, args, files):
        self.verbose = args.verbose
        self.env = environment(args.san)
        self.total = len(files)
        self.computing = collections.deque(f for f in files if not WAITING.search(f[0]))
        self.waiting = collections.deque(f for f in files if WAITING.search(f[0]))
        self.outcomes = []  # of those that are done
        self.stopped = False

    def run_all(self):
        beside = threading.Thread(target=self._run_lane, args=(self.waiting,), daemon=True)
        if self.verbose:
            self._run_lane(self.waiting)
        else:
            beside.start()
        self._run_lane(self.computing)
        if not self.verbose:
            self._run_lane(self.waiting)  # what is left of them, two at a time
        while beside.is_alive():
            beside.join(timeout=1)  # an interrupt is seen in between

    def stop(self):
        self.stopped = True
        for process in list(_running):
            interrupt(process)

    def _run_lane(self, files):
        while not self.stopped:
            try:
                path, command, limit_s = files.popleft()
            except IndexError:
                return
            outcome = Outcome(path)
            started = time.monotonic()
            try:
                code, outcome.output = run(command, limit_s, self.env, self.verbose)
                outcome.seconds = time.monotonic() - started
                judge(outcome, code, limit_s)
            except OSError as error:
                outcome.failed.append(f"cannot be started: {error}")
            self.outcomes.append(outcome)
            print(f"[{len(self.outcomes)}/{self.total}] {path} ... {outcome.passed} ok" +
                  (f", {len(outcome.failed)} FAILED ({'; '.join(outcome.failed)})"
                   if outcome.failed else "") +
                  (f", {len(outcome.skipped)} skipped" if outcome.skipped else "") +
                  f" ({outcome.seconds:.1f} s)", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", default="build/test/bin", help="programs and tests/ [%(default)s]")
    parser.add_argument("--san", default="", help="sanitizers the programs were built with")
    parser.add_argument("--only", default="", help="only files whose path holds this text")
    parser.add_argument("--image", action="store_true",
                        help="the tests of the images that make image has made, and nothing else")
    parser.add_argument("-v", action="store_true", dest="verbose", help="show output as it comes")
    args = parser.parse_args()
    os.chdir(ROOT)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that run() ends what it has started
    files = test_files(args)
    lanes = Lanes(args, files)
    try:
        lanes.run_all()
    except (KeyboardInterrupt, SystemExit):
        print("\ninterrupted")
        lanes.stop()
        report(lanes.outcomes)
        return 130
    # In the order of the files, whichever lane they ran in.
    lanes.outcomes.sort(key=lambda outcome: [path for path, _, _ in files].index(outcome.path))
    return report(lanes.outcomes)


if __name__ == "__main__":
    sys.exit(main())
