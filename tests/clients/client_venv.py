"""Virtual environments of the clients' tests, each made from a file of requirements once:
requirements.txt in build/venv, and requirements-NAME.txt in build/venv-NAME."""
import hashlib
import os
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
VENV = os.path.join(ROOT, "build", "venv")


class NotInstalled(Exception):
    """The packages could not be had; the text is what the command said."""


def make(name=""):
    """Makes it unless it is there already. Answers its Python."""
    suffix = f"-{name}" if name else ""
    requirements = os.path.join(HERE, f"requirements{suffix}.txt")
    venv = VENV + suffix
    python = os.path.join(venv, "bin", "python3")
    stamp = os.path.join(venv, "requirements.sha256")
    with open(requirements, "rb") as file:
        want = hashlib.sha256(file.read() + sys.version.encode()).hexdigest()
    try:
        with open(stamp, encoding="utf-8") as file:
            fresh = file.read() == want
    except FileNotFoundError:
        fresh = False
    if fresh:
        return python
    print(f"installing {os.path.relpath(requirements, ROOT)} into {os.path.relpath(venv, ROOT)}", flush=True)
    for command in ([sys.executable, "-m", "venv", "--clear", venv],
                    [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
                     "-r", requirements]):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              check=False)
        if done.returncode != 0:
            raise NotInstalled(f"{done.stdout.decode(errors='replace')}\nfailed: {' '.join(command)}")
    with open(stamp, "w", encoding="utf-8") as file:
        file.write(want)
    return python


def install():
    """build/venv, without which there is nothing to test."""
    try:
        return make()
    except NotInstalled as why:
        print(f"{why}\nThese tests need the packages of requirements.txt from a Python package index.")
        print("[  FAILED  ] clients_installed")
        sys.exit(1)


def enter(script):
    """Replaces this process by one whose Python has the clients, and prepares it for the tests."""
    if os.path.realpath(sys.prefix) != os.path.realpath(VENV):
        python = install()
        os.execv(python, [python, os.path.abspath(script), *sys.argv[1:]])
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"
    sys.path.insert(0, os.path.dirname(HERE))
