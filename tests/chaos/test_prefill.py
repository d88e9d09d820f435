"""The prefill node killed and frozen at every named step, on both carriers: each cell once."""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import main, test
import faults


@test
def test_f1_prefill_falls_at_every_step_shm(options):
    faults.check_matrix(options, "prefill", "shm")


@test
def test_f1_prefill_falls_at_every_step_tcp(options):
    faults.check_matrix(options, "prefill", "tcp")


if __name__ == "__main__":
    main(__doc__)
