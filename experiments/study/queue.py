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
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from experiments.row_files import Row
from experiments.workers import only, reason

MEMORY = 0.92  # of a GPU, for all runs on it
REPORT_EVERY = 15.0  # seconds
TO_STOP = 25.0  # seconds before the end, for runs to save
TO_BE_KILLED = 22.0  # seconds after that
# Without Triton's products XLA compiles in seconds, not minutes, and is as fast.
FLAGS = "--xla_gpu_enable_triton_gemm=false"


class Work(NamedTuple):
    """A run to be made: its name for messages, that of its folder, and its rows."""

    name: str
    key: str
    rows: list[Row]


@dataclasses.dataclass
class _Running:
    work: Work
    folder: Path
    process: "subprocess.Popen[bytes]"
    gpu: int
    began: float
    asked: float | None = None  # when it was asked to stop


@dataclasses.dataclass
class Queue:
    """Makes runs.

    Attributes:
        module: has `measure(job)`, see `Study`.
        folder: for the runs' folders and XLA's compiled programs.
        gpus: how many; none runs on the CPU.
        side_by_side: runs on each GPU.
        take: is called with the rows of each run that ends.
        say: prints a line.
    """

    module: str
    folder: Path
    gpus: int
    side_by_side: int
    take: Callable[[list[Row]], object]
    say: Callable[[str], object] = lambda line: print(line, flush=True)

    def run(self, works: list[Work], seconds: float) -> dict[str, str]:
        """Makes these runs in their order; returns what became of each.

        That is "finished", "stopped", "not started", or why it failed.
        """
        begin = said = time.monotonic()
        end = begin + seconds - TO_STOP
        slots = [gpu for _ in range(self.side_by_side) for gpu in range(max(self.gpus, 1))]
        waiting, running = list(works), list[_Running]()
        outcomes: dict[str, str] = {}
        longest = 0.0  # seconds of a run
        try:
            while running or waiting:
                now = time.monotonic()
                for one in [one for one in running if one.process.poll() is not None]:
                    running.remove(one)
                    outcomes[one.work.name] = outcome = self._taken(one)
                    self.say(f"{now - begin:4.0f} s  {one.work.name}: {outcome}")
                    if outcome == "finished":
                        longest = max(longest, now - one.began)
                while waiting and len(running) < len(slots):
                    # A run is faster where fewer run beside it.
                    if now + longest * (len(running) + 1) / len(slots) > end:
                        outcomes |= dict.fromkeys((one.name for one in waiting), "not started")
                        waiting.clear()
                        break
                    free = list(slots)
                    for one in running:
                        free.remove(one.gpu)
                    running.append(self._started(waiting.pop(0), free[0]))
                if now > end:
                    _stop(running)
                if now - said > REPORT_EVERY:
                    said = now
                    self.say(_progress(running, now - begin, seconds, len(waiting)))
                time.sleep(0.2)
        finally:
            for one in running:
                one.process.kill()
        return outcomes

    def _started(self, work: Work, gpu: int) -> _Running:
        folder = self.folder / "runs" / work.key
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "rows.json").unlink(missing_ok=True)
        told = {"rows": work.rows, "work": str(self.folder.absolute())}
        (folder / "job.json").write_text(json.dumps(told))
        env = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": str((self.folder / "xla").absolute()),
            "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{MEMORY / self.side_by_side:.3f}",
        }
        if self.gpus:
            flags = f"{FLAGS} {os.environ.get('XLA_FLAGS', '')}".strip()
            env |= {"XLA_FLAGS": flags} | only([gpu])
        command = [sys.executable, "-m", "experiments.study.worker", self.module, str(folder)]
        with (folder / "errors.txt").open("wb") as errors:
            process = subprocess.Popen(command, stdout=errors, stderr=errors, env=env)
        return _Running(work, folder, process, gpu, time.monotonic())

    def _taken(self, one: _Running) -> str:
        """What became of a run that ended; if it is complete, its rows are taken."""
        if one.process.returncode == 0:
            self.take(json.loads((one.folder / "rows.json").read_text()))
            shutil.rmtree(one.folder)
            return "finished"
        if one.asked is not None:
            return "stopped"
        if one.process.returncode < 0:
            return f"ended by {signal.Signals(-one.process.returncode).name}"
        return reason((one.folder / "errors.txt").read_text(errors="replace"))


def _stop(running: list[_Running]) -> None:
    """Asks each run to stop, once; ends those that did not in time."""
    now = time.monotonic()
    for one in running:
        if one.asked is None:
            one.asked = now
            one.process.terminate()
        elif now - one.asked > TO_BE_KILLED:
            one.process.kill()


def _progress(running: list[_Running], gone: float, seconds: float, waiting: int) -> str:
    reports = []
    for one in running:
        file = one.folder / "progress.txt"
        report = file.read_text() if file.exists() else "starts"
        reports.append(f"{one.work.name} {report}")
    left = f"{seconds - gone:.0f} s left, {waiting} waiting"
    return f"{gone:4.0f} s  {' | '.join(reports)}   ({left})"
