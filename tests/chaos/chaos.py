"""make chaos: the matrix of the test files here, many rounds. Prints each failing cell; exits 1 on any."""
import argparse
import os
import signal
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import faults
import test_histories
import turns


def run():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bin", default="build/test/bin")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that clusters are stopped
    failed = total = 0
    for role in ("prefill", "decode", "kvstore"):
        for carrier in faults.CARRIERS:
            for name, error in faults.run_matrix(options, role, carrier, options.rounds):
                total += 1
                failed += error is not None
                if error is not None:
                    print(f"FAILED {role} {name}: {error}", flush=True)
                elif total % 10 == 0:
                    print(f"{total} cells, {failed} failed", flush=True)
    for seed in range(1, options.rounds + 1):
        for carrier in faults.CARRIERS:
            total += 1
            try:
                test_histories.run_seed(options, seed, 20, carrier)
            except (AssertionError, OSError, RuntimeError) as error:
                failed += 1
                print(f"FAILED histories {carrier} seed {seed}: {error}", flush=True)
        print(f"histories: seed {seed}, {failed} failed", flush=True)
    for seed in range(1, 1 + max(1, options.rounds // 10)):
        total += 1
        try:
            turns.run_all(options, seed)
        except (AssertionError, OSError, RuntimeError) as error:
            failed += 1
            print(f"FAILED turns seed {seed}: {error}", flush=True)
    print(f"{total - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run())
