"""The virtual environment of the clients' tests: build/venv, made from requirements.txt once."""
import hashlib
import os
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
REQUIREMENTS = os.path.join(HERE, "requirements.txt")
VENV = os.path.join(ROOT, "build", "venv")


def install():
    """Makes it unless it is there already."""
    python = os.path.join(VENV, "bin", "python3")
    stamp = os.path.join(VENV, "requirements.sha256")
    with open(REQUIREMENTS, "rb") as file:
        want = hashlib.sha256(file.read() + sys.version.encode()).hexdigest()
    try:
        with open(stamp, encoding="utf-8") as file:
            fresh = file.read() == want
    except FileNotFoundError:
        fresh = False
    if fresh:
        return python
    print(f"installing {os.path.relpath(REQUIREMENTS, ROOT)} into build/venv", flush=True)
    for command in ([sys.executable, "-m", "venv", "--clear", VENV],
                    [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
                     "-r", REQUIREMENTS]):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              check=False)
        if done.returncode != 0:
            print(done.stdout.decode(errors="replace"))
            print(f"failed: {' '.join(command)}\n"
                  "These tests need the packages of requirements.txt from a Python package index.")
            print("[  FAILED  ] clients_installed")
            sys.exit(1)
    with open(stamp, "w", encoding="utf-8") as file:
        file.write(want)
    return python


def enter(script):
    """Replaces this process by one whose Python has the clients, and prepares it for the tests."""
    if os.path.realpath(sys.prefix) != os.path.realpath(VENV):
        python = install()
        os.execv(python, [python, os.path.abspath(script), *sys.argv[1:]])
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"
    sys.path.insert(0, os.path.dirname(HERE))
