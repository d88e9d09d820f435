"""What check_gpu.py and bench_gpu.py share: is there a device, and the devices' tools."""
import os
import shutil
import subprocess

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
GPU = "build/gpu"
NO_DEVICE = 3  # of gpu_copy


def run(command, limit_s, **environment):
    """(exit code or None for a timeout, output)."""
    env = {**os.environ, "UCX_MEM_EVENTS": "n", **environment}
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env,
                              timeout=limit_s, check=False)
    except subprocess.TimeoutExpired as error:
        return None, (error.output or b"").decode(errors="replace")
    return done.returncode, done.stdout.decode(errors="replace")


def why_not():
    """Why nothing can run here, or None."""
    program = os.path.join(GPU, "gpu_copy")
    if not os.path.exists(program):
        return "not built: nvcc was not found, or CUDA=0"
    code, output = run([program], 120)
    if code == NO_DEVICE:
        return "no CUDA device: " + output.strip().split(": ")[-1]
    return None if code == 0 else f"the device fails: {output.strip()[-300:]}"


def describe():
    """The device, in words."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return "a CUDA device (no nvidia-smi)"
    _, output = run([smi, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"], 60)
    return output.strip()
