"""Starts processes of one run on this machine, as a launcher would on several."""

import contextlib
import os
import random
import re
import socket
import subprocess
import sys
from pathlib import Path

import quick

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 1200  # after which a process of seconds hangs, however slow the machine is
PORTS = random.Random(os.getpid())  # other processes look for ports at the same time
LAUNCHERS = ("JAX_COORD", "JAX_PROCESS", "JAX_LOCAL", "SLURM_", "OMPI_", "CUDA_VISIBLE")


def free_port():
    """A port that nobody has, and that the system gives to nobody who asks for any."""
    while True:
        port = PORTS.randrange(10_000, 30_000)
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port


def environment(**variables):
    """Ours without what a launcher may have said, one CPU device, and `variables`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    fixed = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": quick.FLAGS, "PYTHONPATH": str(ROOT)}
    return {**kept, **fixed, **{name: str(value) for name, value in variables.items()}}


def begin(arguments, **variables):
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def begin_all(arguments, count, *, begin=begin, **variables):
    """`count` processes that know of each other by JAX's variables; `begin` starts one."""
    address = f"127.0.0.1:{free_port()}"
    return [
        begin(
            arguments,
            JAX_COORDINATOR_ADDRESS=address,
            JAX_PROCESS_COUNT=count,
            JAX_PROCESS_ID=index,
            **variables,
        )
        for index in range(count)
    ]


def line(process, words):
    """What it prints next that begins with these words, to the end of the line."""
    for said in process.stdout:
        if found := lines(said, words):
            return found[0]
    raise AssertionError(process.stderr.read())


def lines(text, words):
    """All that begins with these words; Gloo, which joins CPUs, may stand before them in a line."""
    return re.findall(f"{words}.*", text)


def outputs(processes, code=0):
    """What each printed, after all ended with the code."""
    try:
        said = [process.communicate(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, said, strict=True):
        assert process.returncode == code, errors
    return [out for out, _ in said]
