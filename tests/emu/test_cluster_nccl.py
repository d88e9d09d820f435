"""Clusters whose nodes have emulated devices, with NCCL's double between them: blocks go from device to
device, answers are those of one process on the CPU, bit for bit, and whoever falls or freezes in the
middle of it takes nobody along.

The model is the first two layers of the reference's: an emulated pass of all of them takes seconds.
"""
import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "e2e"))
from cluster import Cluster, Skip, main, test, wait_until
from emulated import DEVICE, programs
from one_process import MODEL, ask, one_process, reference_prompts

STEPS = 2  # the second one reads what came
LAYERS = 2
NO_NCCL, REFUSED = 4, 5  # of gpu_nccl
TOKENS = 56  # of a prompt: several blocks
TRIES = 8  # to reach a step: on a busy machine an emulated device may be silent for a link's second
folder = tempfile.mkdtemp(prefix="tandem-nccl-")
atexit.register(shutil.rmtree, folder, ignore_errors=True)
# Pieces are asked for, gathered, posted at both ends, and brought to the host's blocks.
READER_FALLS = (("nccl_ask", "stop"), ("nccl_receive", "kill"), ("nccl_receive", "stop"),
                ("nccl_landed", "kill"))
OWNER_FALLS = (("nccl_gathered", "stop"), ("nccl_send", "kill"), ("nccl_send", "stop"))


def run(program, **environment):
    return subprocess.run([program, "1"], capture_output=True, text=True, check=False, timeout=120,
                          env={**os.environ, **environment})


def model(options):
    path = os.path.join(folder, "two-layers.gguf")
    if not os.path.exists(path):
        subprocess.run([os.path.join(options.bin, "tandem-truncate"), "--layers", str(LAYERS), MODEL,
                        path], check=True)
    return path


def prompt():
    return reference_prompts("v21")[0][:TOKENS]


def expected(options):
    return one_process(options, [prompt()], STEPS, model=model(options))[0]


def device_cluster(options, **more):
    if os.environ.get("TANDEM_GPU"):
        raise Skip("NCCL links two devices")
    program = os.path.join(options.bin, "emu", "gpu_nccl")
    if os.path.exists(program) and run(program).returncode == NO_NCCL:
        raise Skip("built without nccl.h")
    place = tempfile.mkdtemp(dir=folder)
    environment = {"UCX_TLS": "tcp", **more.pop("env", {})}
    return Cluster(programs(options, place), kvstore=0, http_timeout_s=120, model=model(options),
                   router_args=["--allow-placement"], env=environment, **more)


def moved(c, process_id, carrier="nccl"):
    role = process_id.split("-")[0]
    return c.metrics(process_id)[f'tandem_{role}_transfer_bytes_total{{carrier="{carrier}"}}']


def links(c, process_id):
    role = process_id.split("-")[0]
    return c.metrics(process_id).get(f"tandem_{role}_nccl_links", 0)


def check(c, want, salt, **place):
    got, _ = ask(c, prompt(), STEPS, cache_salt=salt, tandem=place)
    assert got == want, (salt, got, want)


def open_link(c, want, prefill, decode):
    """The first blocks take another way, and the communicator comes up meanwhile."""
    check(c, want, f"first-{prefill}-{decode}", prefill=prefill, decode=decode)
    wait_until(lambda: links(c, decode) >= 1, 20, "a communicator")


@test
def test_i1_blocks_go_from_device_to_device(options):
    want = expected(options)
    with device_cluster(options, prefill_args=DEVICE, decode_args=DEVICE) as c:
        open_link(c, want, "prefill-1", "decode-1")
        for i in range(3):
            check(c, want, f"salt{i}", prefill="prefill-1", decode="decode-1")
        assert moved(c, "decode-1") > 0, c.metrics("decode-1")
        assert c.metrics("prefill-1")["tandem_prefill_nccl_sent_bytes_total"] >= moved(c, "decode-1")
        c.wait_at_rest()


@test
def test_other_carriers_where_one_end_has_no_device_or_does_not_want(options):
    want = expected(options)
    for sides in ({"prefill_args": DEVICE},
                  {"prefill_args": DEVICE, "decode_args": (*DEVICE, "--nccl", "off")},
                  {"prefill_args": DEVICE, "decode_args": DEVICE, "env": {"EMU_NO_NCCL": "1"}},
                  {"prefill_args": DEVICE, "decode_args": DEVICE, "env": {"EMU_BUS": "one"}}):
        with device_cluster(options, **sides) as c:
            for i in range(2):
                check(c, want, f"salt{i}", prefill="prefill-1", decode="decode-1")
            assert moved(c, "decode-1") == 0 and moved(c, "decode-1", "tcp") > 0, sides


@test
def test_what_goes_wrong_inside_nccl_costs_time_only(options):
    want = expected(options)
    for fault in ("init_hangs:1", "send_hangs:1", "send_breaks:1"):
        with device_cluster(options, prefill_args=DEVICE, decode_args=DEVICE,
                            env={"EMU_NCCL_FAULT": fault}) as c:
            for i in range(3):
                check(c, want, f"salt{i}", prefill="prefill-1", decode="decode-1")
            c.wait_at_rest()


def fall(options, role, step, action):
    """The victim falls while blocks are on their way; another node of its role answers instead."""
    want = expected(options)
    other = {"prefill": "decode", "decode": "prefill"}[role]
    with device_cluster(options, **{role: 2}, prefill_args=DEVICE, decode_args=DEVICE,
                        args_of={f"{role}-2": ("--fault", f"{step}:{action}")}) as c:
        victim, survivor = f"{role}-2", f"{other}-1"
        place = {role: victim, other: survivor}
        open_link(c, want, place["prefill"], place["decode"])
        for i in range(TRIES):
            check(c, want, f"salt{i}", **place)
            if not c.alive(victim) or is_stopped(c, victim):
                break
        else:
            raise AssertionError(f"{step} was not reached")
        assert c.alive(survivor)
        series = f"tandem_{other}_nccl"
        wait_until(lambda: c.metrics(survivor)[f"{series}_aborted_total"] > 0, 10,
                   "the communicator is given up")
        wait_until(lambda: c.metrics(survivor)[f"{series}_quarantined"] == 0, 10,
                   "no staging memory is held")
        check(c, want, "after", **{role: f"{role}-1", other: survivor})
        c.wait_at_rest([survivor, f"{role}-1"])
        if c.alive(victim):
            c.kill(victim, signal.SIGKILL)


def is_stopped(c, process_id):
    with open(f"/proc/{c.pids()[process_id]}/stat", encoding="utf-8") as file:
        return file.read().rsplit(")", 1)[1].split()[0] == "T"


@test
def test_the_program_that_devices_are_checked_with(options):
    program = os.path.join(options.bin, "emu", "gpu_nccl")
    if not os.path.exists(program):
        raise Skip("not built (thread sanitizer, no clang++ or no CUDA headers)")
    done = run(program)
    if done.returncode == NO_NCCL:
        raise Skip("built without nccl.h")
    assert done.returncode == 0 and json.loads(done.stdout)["linked"], done
    # Two ends on one device, which NCCL refuses; of two devices it is a failure.
    for devices, expected in (("1", REFUSED), ("2", 1)):
        done = run(program, EMU_DEVICES=devices, EMU_NCCL_FAULT="init_fails:1")
        assert done.returncode == expected and not json.loads(done.stdout)["linked"], done


@test
def test_i2_a_reader_that_dies_or_freezes(options):
    for step, action in READER_FALLS:
        fall(options, "decode", step, action)


@test
def test_i2_an_owner_that_dies_or_freezes(options):
    for step, action in OWNER_FALLS:
        fall(options, "prefill", step, action)


if __name__ == "__main__":
    main()
