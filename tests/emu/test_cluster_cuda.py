"""A cluster whose nodes run the CUDA backend in the emulator: the tokens and logits of one process on
the CPU, bit for bit, whichever side has a device, with KV handed over between the two kinds."""
import os
import re
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "e2e"))
from cluster import Cluster, Skip, main, test
from emulated import DEVICE, programs
from one_process import ask, one_process, reference_prompts

STEPS = 3
# Of three KV heads. A real one stands for several.
SEVERAL = ("0,0", "0,0,0") if os.environ.get("TANDEM_GPU") else ("0,1", "2,0,1")
TWO, THREE = (DEVICE + ("--device", which) for which in SEVERAL)


def check(options, speculation=({},), count=None, **sides):
    """Each way of drafting gives the tokens and hashes of one process."""
    prompts = [ids[:20] for ids in reference_prompts("v00")][:count]
    expected = one_process(options, prompts, STEPS)
    with tempfile.TemporaryDirectory() as folder:
        with Cluster(programs(options, folder), http_timeout_s=240,
                     router_args=["--allow-placement"], **sides) as c:
            for ids, want in zip(prompts, expected):
                for drafts in speculation:
                    answer, _ = ask(c, ids, STEPS, **drafts,
                                    tandem={"prefill": "prefill-1", "decode": "decode-1"})
                    assert answer == want, (drafts, answer, want)
            for node in ("prefill-1", "decode-1"):
                # What is slower than it should be has the same bits.
                slower = re.findall(r"level=error.*|.*(?:not mapped|not pinned|kernel by kernel).*",
                                    c.log(node))
                assert not slower, slower


def dies(options, device, env):
    """The node with a device, on its own, ends when that fails; the other one answers."""
    prompts = [ids[:20] for ids in reference_prompts("v00")][:1]
    expected = one_process(options, prompts, STEPS)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as own:
        dead = os.path.join(own, "dead")
        with Cluster(programs(options, folder), decode=2, http_timeout_s=240,
                     router_args=["--allow-placement"], args_of={"decode-1": device},
                     env={"EMU_DEAD_FILE": dead, **env}) as c:
            with open(dead, "wb"):
                pass
            answer, _ = ask(c, prompts[0], STEPS, tandem={"prefill": "prefill-1", "decode": "decode-1"})
            assert answer == expected[0], (answer, expected[0])
            c.wait_until(lambda: not c.alive("decode-1"), 30, "the node with the device has ended")
            assert 'msg="stopping" why="the device fails"' in c.log("decode-1")


@test
def test_i1_a_device_computes_prompts_for_a_cpu(options):
    check(options, prefill_args=DEVICE)


@test
def test_i1_a_cpu_computes_prompts_for_a_device(options):
    """Verification of drafts, and drafts of the model's first layers, are passes of the device, too."""
    check(options, [{"speculation": {"drafter": "none", "k": 0}},
                    {"speculation": {"drafter": "early_exit", "k": 2}}], decode_args=DEVICE)


@test
def test_i1_two_nodes_on_one_device(options):
    check(options, prefill_args=DEVICE, decode_args=DEVICE)


@test
def test_i1_two_devices_compute_prompts_for_three(options):
    """Blocks are whole in the nodes' memory, whatever part of them a device has."""
    check(options, [{"speculation": {"drafter": "none", "k": 0}},
                    {"speculation": {"drafter": "early_exit", "k": 2}}], count=1,
          prefill_args=TWO, decode_args=THREE)


@test
def test_i9_one_of_several_devices_that_fails_ends_its_node(options):
    if os.environ.get("TANDEM_GPU"):
        raise Skip("a real device is not broken on purpose")
    dies(options, TWO, {"EMU_DEAD_DEVICE": "1"})


@test
def test_i9_a_device_that_fails_ends_its_node_and_another_answers(options):
    """The process ends with an error, so that whoever runs it starts it anew."""
    if os.environ.get("TANDEM_GPU"):
        raise Skip("a real device is not broken on purpose")
    dies(options, DEVICE, {})


if __name__ == "__main__":
    main()
