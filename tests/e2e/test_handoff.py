"""What the way from prefill to decode costs: transfers hide behind computing, and a store that does not
answer delays nobody. Everything is counted, nothing timed."""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import Cluster, main, test

BLOCK = 16
BLOCK_BYTES = 368640


def handoff_bytes(c, when):
    return c.metrics("decode-1")[f'tandem_decode_handoff_bytes_total{{when="{when}"}}']


@test
def test_most_of_a_long_prompt_is_there_before_it_is_ready(options):
    for carrier in ({}, {"UCX_TLS": "tcp"}):
        with Cluster(options.bin, kvstore=0, prefill_args=["--chunk-tokens", "64"],
                     env=carrier) as c:
            ids = c.request("POST", "/tokenize", {"prompt": "The tide comes in and goes out. " * 80},
                            check=True).json["tokens"][:520]
            assert len(ids) == 520
            c.complete(ids, max_tokens=2, temperature=0, ignore_eos=True)
            early, late = handoff_bytes(c, "early"), handoff_bytes(c, "late")
            blocks = -(-len(ids) // BLOCK)
            assert early + late == blocks * BLOCK_BYTES, (early, late)
            # Eight of nine chunks are whole when the last one begins.
            assert early >= 2 * late, (early, late)


if __name__ == "__main__":
    main(__doc__)
