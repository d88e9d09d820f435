"""The kvstore process killed and frozen at every named step, on both carriers: each cell once."""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import main, test
import faults


@test
def test_f7_kvstore_falls_at_every_step_shm(options):
    faults.check_matrix(options, "kvstore", "shm")


@test
def test_f7_kvstore_falls_at_every_step_tcp(options):
    faults.check_matrix(options, "kvstore", "tcp")


if __name__ == "__main__":
    main(__doc__)
