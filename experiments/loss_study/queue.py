"""Runs side by side: each in a process with its share of a GPU's memory, within a time limit.

The parent holds no GPU. It starts runs in the order given, several on each GPU, and takes their
rows as they end. Near the time limit no run is started that would exceed it, and running ones are
asked to stop: they save their state in their folders, and the next call continues from these if the
machine still has them.
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from experiments.workers import only, reason

RUN = "experiments.loss_study.run"
MEMORY = 0.92  # of a GPU, for all runs on it
SAY_EVERY = 15.0  # seconds
TO_STOP = 25.0  # seconds before the end, for runs to save
TO_BE_KILLED = 22.0  # seconds after that
# Without Triton's products XLA compiles in seconds, not minutes, and is as fast.
FLAGS = "--xla_gpu_enable_triton_gemm=false"


class Work(NamedTuple):
    """A run to be made.

    Attributes:
        name: for messages.
        key: the name of its folder.
        job: what it is told; see `run.Job`.
        row: what its result is added to.
    """

    name: str
    key: str
    job: dict[str, Any]
    row: dict[str, Any]


@dataclasses.dataclass
class _Running:
    work: Work
    process: "subprocess.Popen[bytes]"
    gpu: int
    began: float
    asked: float | None = None  # when it was asked to stop


class Outcome(NamedTuple):
    """What became of the runs, by their names."""

    finished: list[str]
    stopped: list[str]
    failed: dict[str, str]
    left: list[str]


def run(
    works: list[Work],
    folder: Path,
    *,
    gpus: int,
    side_by_side: int,
    seconds: float,
    take: Callable[[dict[str, Any]], object],
    module: str = RUN,
    say: Callable[[str], object] = lambda line: print(line, flush=True),
) -> Outcome:
    """Makes the runs; `take` is called with the row of each that ends.

    Args:
        works: in the order in which they start.
        folder: for the runs' folders and XLA's compiled programs.
        gpus: how many; none runs on the CPU.
        side_by_side: runs on each GPU.
        seconds: until the last run has ended.
        take: keeps a row.
        module: of the processes that make runs, see `run.work`.
        say: prints a line.
    """
    begin = time.monotonic()
    end = begin + seconds - TO_STOP
    waiting, running = list(works), list[_Running]()
    outcome = Outcome([], [], {}, [])
    slots = [gpu for _ in range(side_by_side) for gpu in range(max(gpus, 1))]
    needed: dict[str, float] = {}  # seconds, as measured, by size
    said = begin
    try:
        while running or waiting:
            now = time.monotonic()
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                _take(one, folder, outcome, take, say)
                if one.work.name in outcome.finished:
                    size = one.work.job["size"]
                    needed[size] = max(needed.get(size, 0.0), now - one.began)
            free = _without(slots, [one.gpu for one in running])
            while waiting and free:
                work = waiting[0]
                # A run is faster where fewer run beside it. The first ones show how long it takes.
                share = (len(running) + 1) / len(slots)
                if now + needed.get(work.job["size"], 0.0) * share > end:
                    outcome.left.extend(one.name for one in waiting)
                    say(f"No time left for {', '.join(one.name for one in waiting)}.")
                    waiting.clear()
                    break
                running.append(
                    _start(waiting.pop(0), folder, free.pop(0), gpus, side_by_side, module)
                )
                say(f"{now - begin:4.0f} s  starts {work.name}")
            if now > end:
                _stop(running)
            if now - said > SAY_EVERY:
                said = now
                say(_progress(running, folder, now - begin, seconds, len(waiting)))
            time.sleep(0.2)
    finally:
        for one in running:
            one.process.kill()
    return outcome


def _start(
    work: Work, folder: Path, gpu: int, gpus: int, side_by_side: int, module: str
) -> _Running:
    of_run = folder / "runs" / work.key
    of_run.mkdir(parents=True, exist_ok=True)
    (of_run / "row.json").unlink(missing_ok=True)
    path = of_run / "job.json"
    path.write_text(json.dumps(work.job | {"folder": str(of_run)}))
    env = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str((folder / "xla").absolute()),
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{MEMORY / side_by_side:.3f}",
    }
    if gpus:
        env |= only([gpu])
        env |= {"XLA_FLAGS": f"{FLAGS} {os.environ.get('XLA_FLAGS', '')}".strip()}
    command = [sys.executable, "-m", module, str(path)]
    with (of_run / "errors.txt").open("wb") as errors:
        process = subprocess.Popen(command, stdout=errors, stderr=errors, env=env)
    return _Running(work, process, gpu, time.monotonic())


def _take(
    one: _Running,
    folder: Path,
    outcome: Outcome,
    take: Callable[[dict[str, Any]], object],
    say: Callable[[str], object],
) -> None:
    """The row of a run that ended, or why there is none."""
    of_run, name = folder / "runs" / one.work.key, one.work.name
    if one.process.returncode == 0:
        row = json.loads((of_run / "row.json").read_text())
        take(one.work.row | row)
        outcome.finished.append(name)
        shutil.rmtree(of_run)
        last = row["losses"][-1]
        say(f"        ends {name} after {time.monotonic() - one.began:.0f} s, loss {last:.4f}")
    elif one.asked is not None:
        outcome.stopped.append(name)
        say(f"        {name} was stopped")
    else:
        outcome.failed[name] = reason((of_run / "errors.txt").read_text(errors="replace"))
        say(f"        {name} failed: {outcome.failed[name]}")


def _stop(running: list[_Running]) -> None:
    """Asks each run to stop, once; ends those that did not in time."""
    now = time.monotonic()
    for one in running:
        if one.asked is None:
            one.asked = now
            one.process.terminate()
        elif now - one.asked > TO_BE_KILLED:
            one.process.kill()


def _without(slots: list[int], used: list[int]) -> list[int]:
    free = list(slots)
    for gpu in used:
        free.remove(gpu)
    return free


def _progress(
    running: list[_Running], folder: Path, gone: float, seconds: float, waiting: int
) -> str:
    parts = []
    for one in running:
        path = folder / "runs" / one.work.key / "progress.json"
        at = json.loads(path.read_text()) if path.exists() else None
        where = f"{at['step']}/{at['of']} {at['loss']:.3f}" if at else "compiles"
        parts.append(f"{one.work.name} {where}")
    left = f"{seconds - gone:.0f} s left, {waiting} waiting"
    return f"{gone:4.0f} s  {' | '.join(parts)}   ({left})"
