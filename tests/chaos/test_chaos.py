"""Every process killed and frozen at every named step, on both carriers: each cell once."""
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import main, test
import faults


def matrix(options, role, carrier):
    bad = []
    for name, error in faults.run_matrix(options, role, carrier):
        print(f"    {name}: {'ok' if error is None else error}", flush=True)
        if error is not None:
            bad.append(name)
    assert not bad, bad


@test
def test_f1_prefill_falls_at_every_step_shm(options):
    matrix(options, "prefill", "shm")


@test
def test_f1_prefill_falls_at_every_step_tcp(options):
    matrix(options, "prefill", "tcp")


@test
def test_f2_decode_falls_at_every_step_shm(options):
    matrix(options, "decode", "shm")


@test
def test_f2_decode_falls_at_every_step_tcp(options):
    matrix(options, "decode", "tcp")


@test
def test_f7_kvstore_falls_at_every_step_shm(options):
    matrix(options, "kvstore", "shm")


@test
def test_f7_kvstore_falls_at_every_step_tcp(options):
    matrix(options, "kvstore", "tcp")


@test
def test_f4_the_only_node_of_a_role_falls(options):
    for role in ("prefill", "decode"):
        for carrier in ("shm", "tcp"):
            for action in ("kill", "stop"):
                faults.run_lonely_cell(options, role, carrier, action)


if __name__ == "__main__":
    main(__doc__)
