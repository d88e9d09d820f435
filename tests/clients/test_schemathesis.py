#!/usr/bin/env python3
"""Schemathesis reads /openapi.json and asks a cluster for everything in it, with data that is right and
data that is wrong: each answer has to be one that the description knows."""
import os
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import client_venv
from cluster import Cluster, Skip, main, test

SEED = 1
EXAMPLES = 10  # of each operation, drawn; the phases before have what their schemas suggest
# positive_data_acceptance is left out: what fields must be to each other, or to the model, no schema says
# (max_tokens before min_tokens, a prompt that gives a token).
WITHOUT = "positive_data_acceptance"
CONTEXT = ["--context-max", "64"]  # so that what asks for no end is short


@test
def test_every_operation_answers_as_described(options):
    try:
        python = client_venv.make("schemathesis")
    except client_venv.NotInstalled as why:
        raise Skip(f"not installed: {str(why).strip().splitlines()[-1][:200]}") from why
    with Cluster(options.bin, kv_memory="256M", kvstore=0, prefill_args=CONTEXT, decode_args=CONTEXT,
                 router_args=[*CONTEXT, "--allow-placement"]) as c, \
            tempfile.TemporaryDirectory(prefix="tandem-schemathesis-") as folder:
        command = [os.path.join(os.path.dirname(python), "st"), "run", f"{c.url}/openapi.json",
                   "--phases", "examples,coverage,fuzzing", "--exclude-checks", WITHOUT,
                   "--seed", str(SEED), "--max-examples", str(EXAMPLES), "--no-shrink",
                   # Several workers are no faster, and trip over each other inside the tool.
                   "--continue-on-failure", "--workers", "1", "--no-color",
                   "--generation-database", "none", "--request-timeout", str(c.http_timeout_s)]
        env = {**os.environ, "SCHEMATHESIS_HOOKS": "schemathesis_hooks",
               "PYTHONPATH": client_venv.HERE, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        done = subprocess.run(command, cwd=folder, env=env, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        text = done.stdout.decode(errors="replace")
        print("\n".join(line for line in text.splitlines() if line.strip())[-12000:])
        assert done.returncode == 0, done.returncode
        assert "generated, " in text, "it says how many cases there were"
        for process_id in c.ids():
            assert c.alive(process_id), process_id
        c.wait_at_rest()


if __name__ == "__main__":
    main(__doc__)
