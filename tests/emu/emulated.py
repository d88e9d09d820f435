"""Nodes whose device is the emulator, for tests of whole clusters."""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import Skip

DEVICE = ("--backend", "cuda", "--device-kv", "64M")


def programs(options, folder):
    """A folder of programs with the emulator's nodes among them."""
    if os.environ.get("TANDEM_GPU"):
        return options.bin  # on a real one
    emulated = os.path.join(os.path.abspath(options.bin), "emu")
    if not os.path.exists(os.path.join(emulated, "tandem-decode")):
        raise Skip("not built (thread sanitizer, no clang++ or no CUDA headers)")
    for name in os.listdir(options.bin):
        path = os.path.join(os.path.abspath(options.bin), name)
        if os.path.isfile(path):
            own = os.path.join(emulated, name)
            os.symlink(own if os.path.exists(own) else path, os.path.join(folder, name))
    return folder
