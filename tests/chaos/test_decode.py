"""The decode node killed and frozen at every named step, on both carriers: each cell once."""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import main, test
import faults


@test
def test_f2_decode_falls_at_every_step_shm(options):
    faults.check_matrix(options, "decode", "shm")


@test
def test_f2_decode_falls_at_every_step_tcp(options):
    faults.check_matrix(options, "decode", "tcp")


@test
def test_f4_the_only_node_of_a_role_falls(options):
    for lonely in ("prefill", "decode"):
        for carrier in faults.CARRIERS:
            for action in faults.ACTIONS:
                faults.run_lonely_cell(options, lonely, carrier, action)


if __name__ == "__main__":
    main(__doc__)
