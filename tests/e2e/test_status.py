"""What people see of a cluster: /status, the page that shows it (in headless Chromium), the access log."""
import base64
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import Cluster, Skip, main, run_together, test, wait_until

PROMPT = "The harbour master wrote down every ship that came in with the evening tide. " * 4
LINE = re.compile(r'time=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z client=(\S+) method=(\S+) '
                  r'path="([^"]*)" status=(\d+) ms=(\d+\.\d{3})( req=.*)?')


def fields(line):
    """An access log's line as a dict; fails where it is none."""
    found = LINE.fullmatch(line)
    assert found, line
    more = dict(pair.split("=", 1) for pair in re.findall(r'\w+=(?:"[^"]*"|\S+)', found[6] or ""))
    return {"client": found[1], "method": found[2], "path": found[3], "status": int(found[4]), **more}


def read_log(path):
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as file:
        return [fields(line.rstrip("\n")) for line in file]


@test
def test_status_tells_nodes_and_requests(options):
    with Cluster(options.bin, prefill=2, decode=1, kvstore=1) as c:
        first = c.complete(PROMPT, max_tokens=6, ignore_eos=True, headers={"x-request-id": "first"})
        c.complete(PROMPT, max_tokens=5, ignore_eos=True, stream=True,
                   headers={"x-request-id": "again"}).collect()
        assert c.complete(PROMPT, max_tokens=-1, check=False,
                          headers={"x-request-id": "bad"}).status == 400
        c.wait_at_rest()

        def told():
            return len(c.request("GET", "/status", check=True).json["requests"]) == 3
        wait_until(told, 10, "three requests have ended")
        wait_until(lambda: len(c.nodes()) == 4, 10, "four nodes are known")
        status = c.request("GET", "/status", check=True).json
        assert status["state"] == "ready" and status["router"] == "router", status
        assert status["model"] == c.model
        nodes = {node["id"]: node for node in status["nodes"]}
        assert {(n["role"], n["state"]) for n in nodes.values()} == {
            ("prefill", "live"), ("decode", "live"), ("kvstore", "live")}, nodes
        for node in nodes:
            wait_until(lambda node=node: c.nodes()[node]["total_blocks"] > 0, 10, f"{node} tells")
        wait_until(lambda: c.nodes()["kvstore-1"]["store_master"], 10, "a store leads")
        wait_until(lambda: c.nodes()["decode-1"]["fetched_bytes"] > 0, 10, "KV was fetched")
        bad, again, begun = status["requests"]
        assert [r["request"] for r in (begun, again, bad)] == ["first", "again", "bad"]
        assert (begun["outcome"], begun["status"], begun["stream"]) == ("ok", 200, False), begun
        assert begun["prompt_tokens"] == first.usage["prompt_tokens"]
        assert begun["completion_tokens"] == 6 and begun["cached_tokens"] == 0
        assert 0 < begun["ttft_ms"] <= begun["ms"]
        assert begun["prefill"] == first.headers["x-tandem-prefill"]
        assert (again["stream"], again["completion_tokens"]) == (True, 5)
        assert again["cached_tokens"] > 0
        assert (bad["outcome"], bad["status"], bad["ttft_ms"]) == ("bad_request", 400, None), bad
        assert status["counts"]["ended"]["ok"] == 2
        assert status["counts"]["ended"]["bad_request"] == 1
        # Prompts and answers are nowhere in it.
        assert "harbour" not in json.dumps(status)
        # Whoever asks all the time makes it write one in 100 ms, and reads that again.
        begun_s = time.monotonic()
        written = {c.request("GET", "/status", check=True).json["uptime_ms"] for _ in range(100)}
        assert len(written) <= 2 + (time.monotonic() - begun_s) / 0.1, len(written)


@test
def test_tenants_see_their_own_requests(options):
    with tempfile.TemporaryDirectory() as folder:
        keys = os.path.join(folder, "keys")
        with open(os.open(keys, os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="utf-8") as file:
            file.write("key-of-a name=a\nkey-of-b name=b\n")
        with Cluster(options.bin, kvstore=0, router_args=["--api-key-file", keys]) as c:
            def ask(path, key, **more):
                return c.request("POST" if more else "GET", path, more or None, check=True,
                                 headers={"Authorization": f"Bearer {key}"})
            assert c.request("GET", "/status").status == 401
            assert c.request("GET", "/").status == 200  # it says nothing of the cluster by itself
            model = ask("/v1/models", "key-of-a").json["data"][0]["id"]
            for key in ("key-of-a", "key-of-b", "key-of-a"):
                ask("/v1/completions", key, model=model, prompt="Hi", max_tokens=2)
            for key, name, most in (("key-of-a", "a", 2), ("key-of-b", "b", 1)):
                wait_until(lambda: len(ask("/status", key).json["requests"]) >= most, 10, "its own")
                seen = ask("/status", key).json["requests"]
                assert [r["tenant"] for r in seen] == [name] * most, seen


@test
def test_access_log_has_a_line_for_each_request(options):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "access.log")
        with Cluster(options.bin, kvstore=0, router_args=["--access-log", path]) as c:
            c.complete(PROMPT, max_tokens=4, ignore_eos=True, headers={"x-request-id": "whole"})
            c.request("GET", '/no%22such%0apath')
            c.request("POST", "/v1/completions", b"{", headers={"x-request-id": "broken"})
            stream = c.complete(PROMPT, max_tokens=4000, ignore_eos=True, stream=True,
                                headers={"x-request-id": "left"})
            next(iter(stream))
            stream.close()

            def ended(*wanted):
                seen = [line.get("req") for line in read_log(path)]
                return all(request in seen for request in wanted)
            wait_until(lambda: ended("whole", "broken", "left"), 20, "lines are written")
            lines = {line.get("req", line["path"]): line for line in read_log(path)}
            whole, left = lines["whole"], lines["left"]
            assert (whole["status"], whole["outcome"], whole["completion_tokens"]) == (200, "ok", "4")
            assert whole["client"] == "127.0.0.1" and whole["tenant"] == "all"
            assert (whole["prefill"], whole["decode"]) == ("prefill-1", "decode-1")
            assert lines["/no?such?path"]["status"] == 404
            assert (lines["broken"]["status"], lines["broken"]["outcome"]) == (400, "bad_request")
            assert (left["status"], left["outcome"], left["stream"]) == (200, "client_gone", "1")
            assert int(left["completion_tokens"]) >= 1
            assert "harbour" not in open(path, encoding="utf-8").read()

            # A rotation takes the file away: the next line makes a new one, none is lost.
            os.rename(path, path + ".1")
            c.complete("Hi", max_tokens=1, headers={"x-request-id": "rotated"})
            wait_until(lambda: ended("rotated"), 20, "the new file has it")
            count = 200
            run_together([()] * count, lambda: c.request("GET", "/health"))
            c.kill("router", 15)
            wait_until(lambda: not c.alive("router"), 30, "the router has ended")
            health = [line for line in read_log(path) if line["path"] == "/health"]
            assert len(health) == count, len(health)


# --- the page, in a browser ---------------------------------------------------------------------------


class Browser:
    """Headless Chromium, spoken to over its DevTools pipe."""

    def __init__(self, width, height):
        program = shutil.which("chromium") or shutil.which("chromium-browser")
        if program is None:
            raise Skip("chromium is needed (Debian's package)")
        self.folder = tempfile.mkdtemp(prefix="tandem-chromium-")
        self.number = 0
        self.errors = []
        to_read, self.to = os.pipe()
        self.source, from_write = os.pipe()

        def descriptors():
            # Chromium has its end of the pipe at 3 and 4.
            os.dup2(to_read, 13), os.dup2(from_write, 14)
            os.dup2(13, 3), os.dup2(14, 4)
        self.process = subprocess.Popen(
            [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
             "--remote-debugging-pipe", f"--user-data-dir={self.folder}", "--no-first-run",
             "--no-proxy-server", "--disable-background-networking", "about:blank"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            preexec_fn=descriptors, close_fds=False, start_new_session=True)
        os.close(to_read)
        os.close(from_write)
        self.rest = b""
        self.session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=width < 600)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self.to)
        os.close(self.source)
        shutil.rmtree(self.folder, ignore_errors=True)

    def read(self):
        while b"\0" not in self.rest:
            more = os.read(self.source, 1 << 16)
            assert more, "chromium has ended"
            self.rest += more
        message, self.rest = self.rest.split(b"\0", 1)
        message = json.loads(message)
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"].get("exception", {}).get("description"))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        return message

    def call(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.read()
            if answer.get("id") == self.number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def run(self, script):
        got = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in got, got["exceptionDetails"]
        return got["result"].get("value")

    def wait(self, script, what):
        wait_until(lambda: self.run(script), 30, what)

    def picture(self, path):
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True,
                         clip={"x": 0, "y": 0, "width": size["width"], "height": size["height"],
                               "scale": 1})
        with open(path, "wb") as file:
            file.write(base64.b64decode(shot["data"]))


def text_of(element_id):
    return f"document.getElementById('{element_id}').innerText"


@test
def test_page_shows_the_cluster_and_chats(options):
    for name, width, height in (("desktop", 1280, 900), ("phone", 390, 844)):
        with Browser(width, height) as browser, \
                Cluster(options.bin, prefill=1, decode=2, kvstore=1) as c:
            for turn in range(3):
                c.complete(PROMPT, max_tokens=24, headers={"x-request-id": f"seen-{turn}"})
            browser.call("Page.navigate", url=c.url.split("/v1")[0] + "/")
            browser.wait(f"document.getElementById('nodes') && {text_of('nodes')}.includes('decode-2')",
                         "nodes are shown")
            browser.wait(f"{text_of('state')} === 'ready'", "the cluster is ready")
            browser.wait(f"{text_of('requests')}.includes('seen-2')", "requests are shown")
            shown = browser.run(text_of("nodes"))
            assert "kvstore, master" in shown and shown.count("live") == 4, shown
            question = "What is the capital of France?"
            expected = c.chat(question, temperature=0, max_tokens=512).text.strip()
            browser.run(f"document.getElementById('say').value = '{question}';"
                        "document.getElementById('chat').requestSubmit()")
            browser.wait("document.querySelector('#talk .note') !== null", "an answer has come")
            talk = browser.run(text_of("talk"))
            assert expected in talk and "first token" in talk and "decode-" in talk, (talk, expected)
            # Markup from outside stays text.
            browser.run("say('<img src=x onerror=alert(1)>', 'user')")
            assert browser.run("document.querySelectorAll('#talk img').length") == 0
            browser.wait(f"{text_of('requests')}.includes('chatcmpl-')", "its own request is shown")
            wide, inner = browser.run("[document.documentElement.scrollWidth, window.innerWidth]")
            assert wide <= inner, (name, wide, inner)
            if options.pictures:
                os.makedirs(options.pictures, exist_ok=True)
                time.sleep(3)  # for the plots to have something to show
                browser.picture(os.path.join(options.pictures, f"status-{name}.png"))
            # The router goes: the page says so, and recovers by itself when it is back.
            c.restart("router")
            browser.wait(f"{text_of('state')} === 'ready' && {text_of('nodes')}.includes('decode-2')",
                         "the page follows the new router")
            bad = [e for e in browser.errors if e and "Failed to load resource" not in e]
            assert not bad, bad


if __name__ == "__main__":
    main(__doc__, lambda parser: parser.add_argument("--pictures", help="folder for screenshots"))
