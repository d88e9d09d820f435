"""A little of `make soak`: mixed load and faults by seed (soak.py)."""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import main, test
from soak import run_soak


@test
def test_i5_mixed_load_and_faults_leave_nothing_wrong_or_behind(options):
    run_soak(options, seed=1, seconds=18)


if __name__ == "__main__":
    main(__doc__)
