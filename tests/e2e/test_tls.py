"""HTTPS: certificates from files, read anew when they change; what is no good is refused, and harms nothing."""
import http.client
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import ROOT, Cluster, main, test, wait_until


MODEL = os.path.join(ROOT, "build/models/SmolLM2-135M-Instruct.Q4_1.gguf")


def openssl(*args):
    subprocess.run(["openssl", *args], check=True, capture_output=True)


class Pair:
    """A certificate of its own, for localhost, and its key."""

    def __init__(self, folder, name):
        self.cert, self.key = (os.path.join(folder, f"{name}.{end}") for end in ("crt", "key"))
        openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                "-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost",
                "-keyout", self.key, "-out", self.cert)
        os.chmod(self.key, 0o600)

    def put(self, cert, key):
        """In place of what is there, as renewals do it: by rename."""
        for source, target in ((self.key, key), (self.cert, cert)):
            shutil.copy2(source, target + ".new")
            os.utime(target + ".new")
            os.rename(target + ".new", target)


def connect(c, trusted, lowest=None, highest=None):
    context = ssl.create_default_context(cafile=trusted)
    if lowest:
        context.minimum_version = lowest
    if highest:
        context.maximum_version = highest
    host, port = c.processes["router"]["http"].rsplit(":", 1)
    connection = http.client.HTTPSConnection("localhost", int(port), context=context, timeout=30)
    connection._create_connection = lambda *_, **more: socket.create_connection((host, int(port)), 30)
    return connection


def ask(connection, method="GET", path="/health", body=None):
    connection.request(method, path, json.dumps(body) if body else None,
                       {"Content-Type": "application/json"} if body else {})
    return connection.getresponse()


def works(c, trusted):
    connection = connect(c, trusted)
    try:
        return ask(connection).status == 200
    except ssl.SSLError:
        return False
    finally:
        connection.close()


@test
def test_https_serves_and_follows_its_files(options):
    with tempfile.TemporaryDirectory() as folder:
        first, second, third = (Pair(folder, name) for name in ("first", "second", "third"))
        cert, key = os.path.join(folder, "tls.crt"), os.path.join(folder, "tls.key")
        first.put(cert, key)
        with Cluster(options.bin, kvstore=0,
                     router_args=["--tls-cert", cert, "--tls-key", key]) as c:
            assert works(c, first.cert) and not works(c, second.cert)
            kept = connect(c, first.cert)
            model = json.load(ask(kept, path="/v1/models"))["data"][0]["id"]
            body = {"model": model, "prompt": "The tide", "max_tokens": 16, "temperature": 0,
                    "ignore_eos": True}
            whole = json.load(ask(kept, "POST", "/v1/completions", body))["choices"][0]["text"]
            # A stream over TLS has the same text, and one that is left is noticed.
            answer = ask(kept, "POST", "/v1/completions", {**body, "stream": True})
            lines = [line[6:] for line in answer.read().decode().split("\n\n") if line]
            assert "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1]) == whole
            left = connect(c, first.cert)
            ask(left, "POST", "/v1/completions", {**body, "stream": True, "max_tokens": 4000}).read(64)
            left.close()

            def status():
                return json.load(ask(kept, path="/status"))["counts"]
            wait_until(lambda: status()["ended"]["client_gone"] == 1 and status()["running"] == 0, 20,
                       "who has left is noticed")
            # Nothing older than TLS 1.2, and no plain HTTP.
            for version, good in ((ssl.TLSVersion.TLSv1_1, False), (ssl.TLSVersion.TLSv1_2, True),
                                  (ssl.TLSVersion.TLSv1_3, True)):
                try:
                    assert ask(connect(c, first.cert, version, version)).status == 200 and good
                except (ssl.SSLError, ConnectionError, ValueError):
                    assert not good, version
            try:
                plain = c.request("GET", "/health").status
            except (http.client.HTTPException, OSError):
                plain = None
            assert plain != 200, plain
            # A new pair is taken without a restart; the connection that is open goes on.
            second.put(cert, key)
            wait_until(lambda: works(c, second.cert), 20, "the new certificate is in use")
            assert not works(c, first.cert)
            assert ask(kept).read() and "TLS certificate renewed" in c.log("router")
            # One that is no pair, or no PEM, changes nothing.
            shutil.copy2(third.cert, cert)
            wait_until(lambda: "certificate in use stays" in c.log("router"), 20, "it is refused")
            assert works(c, second.cert)
            with open(key, "wb") as file:
                file.write(os.urandom(300))
            wait_until(lambda: c.log("router").count("certificate in use stays") == 2, 20, "again")
            assert works(c, second.cert)
            third.put(cert, key)
            wait_until(lambda: works(c, third.cert), 20, "a good one after bad ones")
            # Garbage in place of a handshake ends that connection alone.
            for garbage in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\x16\x03\x01" * 400):
                host, port = c.processes["router"]["http"].rsplit(":", 1)
                with socket.create_connection((host, int(port)), 10) as s:
                    try:
                        s.sendall(garbage)
                        s.shutdown(socket.SHUT_WR)
                        while s.recv(4096):
                            pass
                    except OSError:
                        pass
                assert works(c, third.cert)
            kept.close()


@test
def test_https_wants_a_private_pair(options):
    with tempfile.TemporaryDirectory() as folder:
        a, b = Pair(folder, "a"), Pair(folder, "b")
        secret = os.path.join(folder, "secret")
        with open(os.open(secret, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            file.write(os.urandom(32))
        shutil.copy(a.key, os.path.join(folder, "open.key"))
        os.chmod(os.path.join(folder, "open.key"), 0o644)
        for flags, word in ((["--tls-cert", a.cert], "--tls-key"),
                            (["--tls-key", a.key], "--tls-cert"),
                            (["--tls-cert", a.cert, "--tls-key", b.key], "certificate refused"),
                            (["--tls-cert", a.key, "--tls-key", a.key], "certificate refused"),
                            (["--tls-cert", a.cert, "--tls-key", os.path.join(folder, "open.key")],
                             "mode 0600"),
                            (["--tls-cert", a.cert + ".none", "--tls-key", a.key], "not opened")):
            done = subprocess.run(
                [os.path.join(options.bin, "tandem-router"), "--listen", "tcp://127.0.0.1:*", "--http",
                 "127.0.0.1:0", "--cluster-secret-file", secret, "--model", MODEL, *flags],
                capture_output=True, text=True, timeout=60, check=False)
            assert done.returncode == 1 and word in done.stderr, (flags, done)
            assert "PRIVATE" not in done.stderr


if __name__ == "__main__":
    main(__doc__)
