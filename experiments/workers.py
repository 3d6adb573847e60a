"""Workers: each framework or case runs in a process of its own, with its own GPUs."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from experiments import compilation, measured_cases, measured_code

ERROR = re.compile(r"[\w.]*(?:Error|Exception|Exit|Interrupt)\b.*")


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
    module: str, *arguments: str, remember: bool = True, **variables: str | None
) -> Ended:
    """Runs `python -m module arguments`, which may use 95 % of each GPU.

    What it ran and compiled counts as that of this process.

    Args:
        module: of the worker.
        arguments: its command line.
        remember: whether a worker that succeeded before the same measurement was stopped need not
            run again (see `measured_cases`). Where GPUs are compared with each other it must.
        variables: of its environment, besides those of this process; None unsets one.
    """
    worker = measured_cases.Worker.of([module, *arguments], variables)
    if remember and (before := measured_cases.find(worker)) is not None:
        return Ended(before, 0, "")
    given = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"} | variables
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        given |= {measured_code.REPORT: str(report)}
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            capture_output=True,
            text=True,
            env={name: value for name, value in given.items() if value is not None},
            check=False,
        )
        # A worker that was killed reports nothing.
        reported = json.loads(report.read_text()) if report.exists() else {}
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    ran, compiled = reported.get("ran", {}), reported.get("compilation", {})
    measured_code.add(ran)
    compilation.add(compiled)
    if remember and done.returncode == 0 and results:
        measured_cases.keep(worker, results, ran, compiled, time.perf_counter() - begin)
    return Ended(results, done.returncode, done.stderr)


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


def reason(stderr: str) -> str:
    """The error that ended a worker: the last line of its traceback, not the advice after it."""
    lines = stderr.strip().splitlines()
    errors = [line for line in lines if ERROR.fullmatch(line)]
    return (errors or lines or ["no message"])[-1]
