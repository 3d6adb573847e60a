"""Starts processes of one run on this machine, as a launcher would on several."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAUNCHERS = ("JAX_COORD", "JAX_PROCESS", "JAX_LOCAL", "SLURM_", "OMPI_", "CUDA_VISIBLE")


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def environment(**variables):
    """Ours without what a launcher may have said, one CPU device, and `variables`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    fixed = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    return {**kept, **fixed, **{name: str(value) for name, value in variables.items()}}


def begin(arguments, **variables):
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def begin_all(arguments, count):
    """`count` processes that know of each other by JAX's variables."""
    address = f"127.0.0.1:{free_port()}"
    return [
        begin(
            arguments,
            JAX_COORDINATOR_ADDRESS=address,
            JAX_PROCESS_COUNT=count,
            JAX_PROCESS_ID=index,
        )
        for index in range(count)
    ]


def line(process, beginning):
    """Its next line that begins so; Gloo, which joins CPUs, says things of its own."""
    for said in process.stdout:
        if said.startswith(beginning):
            return said.removesuffix("\n")
    raise AssertionError(process.stderr.read())


def outputs(processes, code=0, seconds=120):
    """What each printed, after all ended with the code."""
    try:
        said = [process.communicate(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, said, strict=True):
        assert process.returncode == code, errors
    return [out for out, _ in said]
