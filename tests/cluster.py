"""Clusters for tests: deploy/local.sh behind a context manager, a small HTTP client, and @test.

    import os, sys
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from cluster import Cluster, main, test

    @test
    def test_says_something(options):
        with Cluster(options.bin) as c:
            assert c.chat("Hello!").text

    if __name__ == "__main__":
        main()

A test that fails prints its traceback, and a cluster it was inside of the ends of all logs.
"""
import argparse
import base64
import glob
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import urllib.request

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LOCAL = os.path.join(ROOT, "deploy", "local.sh")
MODEL = os.path.join(ROOT, "build/models/SmolLM2-135M-Instruct.Q4_1.gguf")
LOG_TAIL_LINES = 15
# Of each node and store, where a test does not say: the programs' own defaults are four times as
# much, and all of it is touched when they start.
KV_MEMORY = "256M"
CAPACITY = "128M"
HELD = ("reserved", "active", "quarantined")  # states of KV blocks
POLL_S = 0.02  # between looks of wait_until()
# What a process of a sanitizer build, or an assertion of ours, leaves in its log.
REPORT = re.compile(r"Sanitizer: |runtime error: |assertion failed")


class Skip(Exception):
    """Raised by a test that cannot run here; the text says why."""


class HTTPError(Exception):
    """An answer other than 200, where 200 was asked for."""

    def __init__(self, response):
        super().__init__(f"HTTP {response.status}: {response.body[:1000].decode(errors='replace')}")
        self.response = response
        self.status = response.status


class Response:
    """A whole answer."""

    def __init__(self, status, headers, body):
        self.status = status
        self.headers = headers  # http.client.HTTPMessage: names in any case
        self.body = body

    @property
    def json(self):
        return json.loads(self.body)

    # The parts of a completion that tests look at most.
    @property
    def choices(self):
        return self.json["choices"]

    @property
    def usage(self):
        return self.json["usage"]

    @property
    def text(self):
        return choice_text(self.choices[0])

    @property
    def texts(self):
        return [choice_text(choice) for choice in self.choices]


class Stream:
    """An answer that comes as server-sent events. Iterate over it, or close() it half-way."""

    def __init__(self, connection, response):
        self.connection = connection
        self.response = response
        self.status = response.status
        self.headers = response.headers
        self.done = False  # [DONE] has come

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __iter__(self):
        """The events' JSON; ends at [DONE], or where the server ends."""
        data = []
        for raw in self.response:
            line = raw.decode("utf-8").rstrip("\r\n")
            if line.startswith("data:"):
                data.append(line[5:].lstrip(" "))
            elif line == "" and data:
                text, data = "\n".join(data), []
                if text == "[DONE]":
                    self.done = True
                    return
                yield json.loads(text)

    def close(self):
        """Closes the socket at once: to the server a client that went away."""
        self.response.close()
        self.connection.close()

    def collect(self):
        """Reads to the end: {index: text}, {index: finish_reason}, usage, all events."""
        return Collected(self)


class Collected:
    """A stream read to its end."""

    def __init__(self, stream):
        self.events = list(stream)
        self.done = stream.done
        self.headers = stream.headers
        self.texts = {}
        self.finish = {}
        self.usage = None
        self.error = None
        for event in self.events:
            self.error = event.get("error", self.error)
            self.usage = event.get("usage") or self.usage
            for choice in event.get("choices", []):
                index = choice["index"]
                self.texts[index] = self.texts.get(index, "") + choice_text(choice)
                self.finish[index] = choice.get("finish_reason") or self.finish.get(index)

    @property
    def text(self):
        return self.texts.get(0, "")


def choice_text(choice):
    """Text of a choice, of a chat or a completion, whole or a chunk."""
    if "text" in choice:
        return choice["text"] or ""
    return (choice.get("message") or choice.get("delta") or {}).get("content") or ""


class Cluster:
    """A cluster of its own in a temporary folder, on free ports."""

    def __init__(self, bin="build/test/bin", prefill=1, decode=1, kvstore=1, routers=1, router_args=(),
                 prefill_args=(), decode_args=(), kvstore_args=(), args_of=None, env=None,
                 precision=None, kv_codec=None, attention=None, context_max=None, threads=None,
                 kv_memory=KV_MEMORY, donate=None, model=None, draft_model=None, timeout_s=None,
                 http_timeout_s=None, etcd=False, self_prefill=0):
        self.bin = os.path.abspath(bin)
        sanitized = "san-" in self.bin
        self.timeout_s = timeout_s or (240 if sanitized else 60)
        self.http_timeout_s = http_timeout_s or (300 if sanitized else 60)
        self.dir = tempfile.mkdtemp(prefix="tandem-test-")
        self.run_dir = os.path.join(self.dir, "run")
        self.env = {**os.environ, "UCX_MEM_EVENTS": "n", **(env or {})}
        self.command = [LOCAL, "up", "--dir", self.run_dir, "--bin", self.bin,
                        "--port", "0", "--router", str(routers), "--prefill", str(prefill), "--decode", str(decode),
                        "--kvstore", str(kvstore), "--timeout", str(self.timeout_s)]
        for option, value in (("--precision", precision), ("--kv-codec", kv_codec),
                              ("--attention", attention), ("--context-max", context_max),
                              ("--threads", threads), ("--kv-memory", kv_memory),
                              ("--donate", donate), ("--model", model),
                              ("--draft-model", draft_model)):
            if value is not None:
                self.command += [option, str(value)]
        if etcd:
            self.command.append("--etcd")
        for kind, args in (("prefill", prefill_args), ("decode", decode_args),
                           ("kvstore", ("--capacity", CAPACITY, *kvstore_args))):
            if args:
                self.command += [f"--{kind}-args", " ".join(args)]
        for process_id, args in (args_of or {}).items():
            self.command += ["--args-of", process_id, " ".join(args)]
        # Most tests are about hand-overs: decode nodes compute prompts where a test asks for it.
        self.command += ["--", "--self-prefill-tokens", str(self_prefill), *router_args]
        self.processes = {}  # id -> entry of cluster.json
        self._model = None

    # --- life -------------------------------------------------------------------------------------

    def __enter__(self):
        # Logs go to a file, not a pipe: the cluster outlives the script and would hold a pipe open.
        up_log = os.path.join(self.dir, "up.log")
        try:
            with open(up_log, "wb") as log:
                code = subprocess.run(self.command, stdin=subprocess.DEVNULL, stdout=log,
                                      stderr=log, env=self.env, check=False).returncode
        except BaseException:  # interrupted: what has started is in cluster.json
            self.down()
            self._remove()
            raise
        if code != 0:
            with open(up_log, encoding="utf-8", errors="replace") as log:
                text = log.read()
            self._remove()
            raise RuntimeError(f"the cluster did not come up:\n{text}")
        self.reload()
        return self

    def __exit__(self, kind, error, trace):
        if kind is not None and not issubclass(kind, Skip):
            self.print_logs()
        try:
            self.down()
            self._raise_reports(kind is None)
        finally:
            self._remove()

    def down(self):
        subprocess.run([LOCAL, "down", "--dir", self.run_dir], stdin=subprocess.DEVNULL,
                       stdout=subprocess.DEVNULL, check=True, env=self.env, timeout=60)

    def _raise_reports(self, may_raise):
        """Sanitizers report leaks only at the end, when nobody asks for the exit code."""
        bad = []
        for process_id in self.processes:
            log = self.log(process_id)
            found = REPORT.search(log)
            if found:
                bad.append(process_id)
                print(f"--- {process_id}: report in its log")
                print(log[max(0, found.start() - 200):found.start() + 6000])
        if bad and may_raise:
            raise AssertionError(f"reports in the logs of {', '.join(bad)}")

    def _remove(self):
        shutil.rmtree(self.dir, ignore_errors=True)

    def reload(self):
        with open(os.path.join(self.run_dir, "cluster.json"), encoding="utf-8") as file:
            self.processes = {entry["id"]: entry for entry in json.load(file)}

    def print_logs(self):
        for process_id in self.processes:
            lines = self.log(process_id).splitlines()
            print(f"--- {process_id} ({'up' if self.alive(process_id) else 'gone'}), "
                  f"last of {len(lines)} lines")
            for line in lines[-LOG_TAIL_LINES:]:
                print(f"    {line}")

    # --- processes --------------------------------------------------------------------------------

    def ids(self, role=None):
        return [i for i, entry in self.processes.items() if role in (None, entry["role"])]

    def pids(self):
        return {process_id: entry["pid"] for process_id, entry in self.processes.items()}

    def kill(self, process_id, sig=signal.SIGKILL):
        os.kill(self.processes[process_id]["pid"], sig)

    def restart(self, process_id, sig=signal.SIGKILL):
        """Ends a process and starts it again in place: same id, flags and addresses."""
        self.start(process_id, self.end(process_id, sig))

    def end(self, process_id, sig=signal.SIGKILL):
        """Ends a process; returns the command that start() takes."""
        entry = self.processes[process_id]
        with open(f"/proc/{entry['pid']}/cmdline", encoding="utf-8") as file:
            command = file.read().split("\0")[:-1]
        if process_id != "etcd":
            with open(os.path.join(self.run_dir, f"{process_id}.ready"), encoding="utf-8") as file:
                http_address, bus_endpoint = file.read().split()
            command[command.index("--http") + 1] = http_address
            command[command.index("--listen") + 1] = bus_endpoint
        self.kill(process_id, sig)
        # A leader may be a zombie while its threads still end, and hold the ports.
        tasks = f"/proc/{entry['pid']}/task/*"
        wait_until(lambda: not self.alive(process_id) and len(glob.glob(tasks)) < 2,
                   240 if "san-" in self.bin else 20,
                   f"{process_id} has ended")
        return command

    def start(self, process_id, command):
        """Starts what end() has ended: same id, flags and addresses."""
        entry = self.processes[process_id]
        ready = os.path.join(self.run_dir, f"{process_id}.ready")
        if os.path.exists(ready):
            os.remove(ready)
        with open(entry["log"], "ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                       env=self.env, start_new_session=True)
        entry["pid"] = process.pid
        with open(os.path.join(self.run_dir, "cluster.json"), "w", encoding="utf-8") as file:
            entries = ",\n ".join(json.dumps(each) for each in self.processes.values())
            file.write(f"[\n {entries}\n]\n")
        if process_id == "etcd":
            return  # whoever asks it tries again
        wait_until(lambda: os.path.exists(ready) and os.path.getsize(ready) > 0, self.timeout_s,
                   f"{process_id} is ready again")

    def nodes(self, router="router"):
        """What a router knows of the cluster's nodes, by id (at most half a second old)."""
        answer = self.request("GET", "/status", to=router, check=True)
        return {node["id"]: node for node in answer.json["nodes"]}

    def live(self, router="router"):
        """How many nodes that router knows to be live."""
        return [node["state"] for node in self.nodes(router).values()].count("live")

    def alive(self, process_id):
        """False also for a zombie."""
        try:
            with open(f"/proc/{self.processes[process_id]['pid']}/stat", encoding="utf-8") as file:
                return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
        except (FileNotFoundError, ProcessLookupError):
            return False

    def log(self, process_id):
        path = self.processes[process_id]["log"]
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()

    def metrics(self, process_id="router"):
        """{series: value}, a series being its name with labels as /metrics shows them."""
        series = {}
        response = self.request("GET", "/metrics", to=process_id, check=True)
        for line in response.body.decode().splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                series[name] = float(value)
        return series

    def held_blocks(self, ids=None):
        """KV blocks that somebody holds, over all prefill and decode nodes or these."""
        total = 0
        for process_id in ids or self.ids("prefill") + self.ids("decode"):
            role = self.processes[process_id]["role"]
            series = self.metrics(process_id)
            total += sum(series[f'tandem_{role}_kv_blocks{{state="{state}"}}'] for state in HELD)
        return total

    def wait_at_rest(self, ids=None, seconds=15):
        """Until nothing is held: an answer is out before its last blocks have reached the store."""
        wait_until(lambda: self.held_blocks(ids) == 0, seconds,
                   "reserved, active and quarantined at 0")

    def known(self, router):
        """Live processes by role."""
        try:
            series = self.metrics(router)
        except (OSError, http.client.HTTPException):
            return {}
        return {role: int(series[f'tandem_router_nodes{{role="{role}"}}'])
                for role in ("prefill", "decode", "kvstore")}

    def wait_known(self, seconds=60, **counts):
        """Until every router knows so many of a role; all that there are of the other roles."""
        wanted = {role: counts.get(role, len(self.ids(role)))
                  for role in ("prefill", "decode", "kvstore")}
        for router in self.ids("router"):
            try:
                wait_until(lambda: self.known(router) == wanted, seconds, "all are known")
            except AssertionError as why:
                raise AssertionError(f"{router} knows {self.known(router)}, not {wanted}") from why

    @property
    def router_endpoint(self):
        """Where processes join."""
        with open(os.path.join(self.run_dir, "router.ready"), encoding="utf-8") as file:
            return file.read().split()[1]

    def joining(self, program, process_id):
        """The beginning of a command of one more process of this cluster."""
        return [os.path.join(self.bin, program), "--id", process_id, "--router",
                self.router_endpoint, "--cluster-secret-file",
                os.path.join(self.run_dir, "cluster.secret")]

    def expect_refused(self, flags, *words):
        """A prefill node that would join with these flags is told why not, in a line with all words."""
        log_path = os.path.join(self.run_dir, "stranger.log")
        with open(log_path, "wb") as log:
            stranger = subprocess.Popen(self.joining("tandem-prefill", "stranger") + flags,
                                        stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                        env=self.env)

        def told():
            with open(log_path, encoding="utf-8", errors="replace") as file:
                return any(all(word in line for word in ("router refused us", *words))
                           for line in file)
        try:
            wait_until(told, self.timeout_s, "the router says what differs")
        finally:
            stranger.terminate()
            stranger.wait()

    # --- etcd -------------------------------------------------------------------------------------

    def etcd(self, path, body, to=None):
        """What one of them answers: that one, or the first that does."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        last = None
        for name in [to] if to else self.ids("etcd"):
            request = urllib.request.Request(f"http://{self.processes[name]['http']}{path}",
                                             json.dumps(body).encode())
            try:
                with opener.open(request, timeout=5) as answer:
                    return json.load(answer)
            except OSError as error:
                last = error
        raise last

    def in_etcd(self):
        """Routers that it names."""
        ends = [base64.b64encode(f"/tandem/tandem/routers{end}".encode()).decode() for end in "/0"]
        found = self.etcd("/v3/kv/range", {"key": ends[0], "range_end": ends[1]}).get("kvs", [])
        return sorted(base64.b64decode(kv["key"]).decode().rsplit("/", 1)[1] for kv in found)

    # --- HTTP -------------------------------------------------------------------------------------

    @property
    def address(self):
        return self.processes["router"]["http"]

    @property
    def url(self):
        return f"http://{self.address}"

    @property
    def model(self):
        """Name of the served model."""
        if self._model is None:
            self._model = self.request("GET", "/v1/models", check=True).json["data"][0]["id"]
        return self._model

    def request(self, method, path, body=None, stream=False, headers=None, timeout_s=None,
                to="router", check=False):
        """body: an object that becomes JSON, or bytes that go as they are.

        Returns a Response; with stream a Stream, if the status is 200."""
        host, port = self.processes[to]["http"].rsplit(":", 1)
        connection = http.client.HTTPConnection(host, int(port),
                                                timeout=timeout_s or self.http_timeout_s)
        all_headers = {"Content-Type": "application/json"} if body is not None else {}
        all_headers.update(headers or {})
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        try:
            connection.request(method, path, body, all_headers)
            raw = connection.getresponse()
            if stream and raw.status == 200:
                return Stream(connection, raw)
            response = Response(raw.status, raw.headers, raw.read())
        except BaseException:
            connection.close()
            raise
        connection.close()
        if (check or stream) and response.status != 200:
            raise HTTPError(response)
        return response

    def chat(self, messages, stream=False, headers=None, check=True, **parameters):
        """messages: a text of the user's, or a list as in the API."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        body = {"model": self.model, "messages": messages, "stream": stream, **parameters}
        return self.request("POST", "/v1/chat/completions", body, stream, headers, check=check)

    def complete(self, prompt, stream=False, headers=None, check=True, **parameters):
        body = {"model": self.model, "prompt": prompt, "stream": stream, **parameters}
        return self.request("POST", "/v1/completions", body, stream, headers, check=check)

    def wait_until(self, predicate, seconds=10, what="condition"):
        return wait_until(predicate, seconds, what)


def wait_until(predicate, seconds=10, what="condition"):
    """Looks again and again until predicate gives something true, and returns that."""
    deadline = time.monotonic() + seconds
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(POLL_S)


def run_together(jobs, run):
    """run(*job) of every job, all at once. What any of them raises is this call's failure."""
    wrong = []

    def one(job):
        try:
            run(*job)
        except Exception as error:  # shown by the caller's own thread
            wrong.append((job, repr(error)[:2000]))

    threads = [threading.Thread(target=one, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong


# --- running tests --------------------------------------------------------------------------------

_tests = []
_shared = {}  # arguments -> cluster


def shared(options, make=None, **arguments):
    """A cluster that the tests of a file use together; main() stops it, and so does a test that fails:
    the next one gets a new one. make(options, ...): one that is no Cluster."""
    key = repr((make, sorted(arguments.items())))
    if key not in _shared:
        cluster = make(options, **arguments) if make else Cluster(options.bin, **arguments)
        _shared[key] = cluster.__enter__()
    return _shared[key]


def test(function):
    """Registers a test; it is called with the parsed options (bin, ...)."""
    _tests.append(function)
    return function


def shared_cluster_ends_clean(cluster):
    cluster.__exit__(None, None, None)


def run_one(function, options):
    """Prints the test's line; False when it failed."""
    name = function.__name__
    started = time.monotonic()
    try:
        function(options)
    except Skip as why:
        print(f"[  SKIPPED ] {name}: {why}", flush=True)
        return True
    except Exception:  # whatever a test raises is its failure
        traceback.print_exc(file=sys.stdout)
        for key in list(_shared):
            _shared.pop(key).__exit__(*sys.exc_info())
        print(f"[  FAILED  ] {name}", flush=True)
        return False
    print(f"    {time.monotonic() - started:.1f} s")
    print(f"[       OK ] {name}", flush=True)
    return True


def main(description=None, add_options=None):
    """Runs the tests of a file in order; exits 1 when one failed. add_options(parser) may add more."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--bin", default="build/test/bin", help="folder of the programs")
    parser.add_argument("--only", default="", help="tests whose name holds this text")
    if add_options is not None:
        add_options(parser)
    options = parser.parse_args()

    def end(*_):
        sys.exit(143)  # so that clusters are stopped on the way out

    signal.signal(signal.SIGTERM, end)
    ok = True
    try:
        for function in _tests:
            if options.only in function.__name__:
                ok = run_one(function, options) and ok
    finally:
        for cluster in list(_shared.values()):
            ok = run_one(shared_cluster_ends_clean, cluster) and ok
    sys.exit(0 if ok else 1)
