"""Workers: each framework or case runs in a process of its own, with its own GPUs."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

ERROR = re.compile(r"[\w.]*(?:Error|Exception|Exit|Interrupt)\b.*")
LIMIT = 3600.0  # seconds of a worker


class Ended(NamedTuple):
    """The results of a worker.

    Attributes:
        results: the objects that it printed, one on each line.
        code: its exit status.
        stderr: what it wrote there.
    """

    results: list[dict[str, Any]]
    code: int
    stderr: str


def run_worker(
    module: str, *arguments: str, limit: float = LIMIT, **variables: str | None
) -> Ended:
    """Runs `python -m module arguments`, which may use 95 % of each GPU.

    Args:
        module: of the worker.
        arguments: its command line.
        limit: the seconds after which it is killed; what it printed until then counts.
        variables: of its environment, besides those of this process; None unsets one.
    """
    given = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"} | variables
    env = {name: value for name, value in given.items() if value is not None}
    command = [sys.executable, "-m", module, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, env=env, check=False, timeout=limit)
        return Ended(_objects(done.stdout), done.returncode, done.stderr.decode(errors="replace"))
    except subprocess.TimeoutExpired as late:
        return Ended(_objects(late.stdout or b""), 1, f"TimeoutError: stopped after {limit:g} s")


def _objects(printed: bytes) -> list[dict[str, Any]]:
    """The lines that are whole objects of JSON."""
    lines = printed.decode().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}\n")]


def outcome(ended: Ended) -> dict[str, Any]:
    """The last object that a worker printed; without any, {"failed": why}.

    If memory ran out, "error" is JAX's message: which memory it was, and how much was requested.
    """
    if ended.results:
        return ended.results[-1]
    error = reason(ended.stderr)
    if "RESOURCE_EXHAUSTED" in ended.stderr:
        return {"failed": "out of memory", "error": error}
    return {"failed": error}


def reason(stderr: str) -> str:
    """The error that ended a worker: the last line of its traceback, not the advice after it."""
    lines = stderr.strip().splitlines()
    errors = [line for line in lines if ERROR.fullmatch(line)]
    return (errors or lines or ["no message"])[-1]


def compiled(lower: Callable[[], Any]) -> tuple[Any, float]:
    """A program, and the seconds for tracing, lowering and compiling it."""
    begin = time.perf_counter()
    program = lower().compile()
    return program, time.perf_counter() - begin


def count_gpus() -> int:
    """How many GPUs there are, asked of the driver: JAX would take their memory."""
    visible = _visible()
    if visible is not None:
        return len(visible)
    if shutil.which("nvidia-smi") is None or os.environ.get("JAX_PLATFORMS") == "cpu":
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def only(gpus: Iterable[int]) -> dict[str, str]:
    """The environment in which a process sees only these of the GPUs that this one sees."""
    visible = _visible()
    names = [str(gpu) if visible is None else visible[gpu] for gpu in gpus]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names)}


def _visible() -> list[str] | None:
    """The GPUs that this process may see; None for all."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if visible is None else [name for name in visible.split(",") if name]
