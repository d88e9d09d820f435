"""Each process of a whole cluster falls once, under load; `make chaos` has all ways of all (turns.py)."""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import turns
from cluster import main, test


@test
def test_i9_each_process_falls_in_turn_and_no_answer_changes(options):
    turns.run_some(options, seed=1)


if __name__ == "__main__":
    main(__doc__)
