"""Measures again whatever needs GPUs, so that all published figures are of the same code.

    python -m experiments.remeasure                     what is not of today's code yet
    python -m experiments.remeasure --list              what there is, and of which code it is
    python -m experiments.remeasure layer_speed --out /tmp/results

Each measurement is an experiment with a process and GPUs of its own. Where there are enough GPUs,
several run side by side; a machine with fewer than an experiment needs leaves it out. A results
file names the code that it measured, as a hash of `coat_jax/`, so a second call continues where the
first one ended. What an experiment prints and writes is in OUT/unfinished/NAME until it succeeds.
"""

import contextlib
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.command import parser_of
from experiments.essence import ROOT, code_hash
from experiments.workers import count_gpus, only

LOG = "log.txt"
POLL = 0.2  # seconds


class Measurement(NamedTuple):
    """An experiment to run.

    Attributes:
        result: its results file, without the suffix.
        command: the module in `experiments`, and its arguments.
        gpus: how many it needs.
        seconds: roughly what it takes on H200s.
        packages: what must be installed for its comparisons.
    """

    result: str
    command: str
    gpus: int
    seconds: int
    packages: tuple[str, ...] = ()


PLAN = (
    Measurement(
        "training_throughput_4_gpus_beside_one", "training_throughput COAT:16 --beside-one", 4, 200
    ),
    Measurement("training_throughput_4_gpus", "training_throughput BF16:8 COAT:8", 4, 200),
    Measurement(
        "training_throughput_2_gpus_beside_one", "training_throughput COAT:16 --beside-one", 2, 200
    ),
    Measurement("communication", "communication", 2, 240),
    Measurement("muon_step_2_gpus", "muon_step", 2, 240, ("torch",)),
    Measurement("gpu_suite", "gpu_suite", 1, 360, ("pytest",)),
    Measurement("layer_table", "layer_speed --table", 1, 660, ("torch", "torchao")),
    Measurement("optimizer_step", "optimizer_step", 1, 400, ("torch", "torchao", "bitsandbytes")),
    Measurement("layer_speed", "layer_speed", 1, 300, ("torch", "torchao")),
    Measurement("training_throughput", "training_throughput", 1, 420),
    Measurement("muon_step", "muon_step", 1, 240, ("torch",)),
    Measurement("examples_memory", "examples_memory", 1, 240),
    Measurement("quantized_generation", "quantized_generation", 1, 900),
    Measurement("in_place_step", "in_place_step", 1, 180),
    Measurement("activation_memory", "activation_memory", 1, 120, ("torch", "torchao")),
    Measurement("group_scaling", "group_scaling", 1, 60),
)


def main() -> int:
    """Runs what is not of today's code yet; the exit code is 0 if nothing failed."""
    parser = parser_of(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of results; default: all")
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    parser.add_argument("--gpus", type=int, default=count_gpus(), help="to use (%(default)s)")
    parser.add_argument("--minutes", type=float, help="stop what is not done by then")
    options = parser.parse_args()
    known = {measurement.result: measurement for measurement in PLAN}
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"{unknown[0]!r} is none of {', '.join(known)}.")
    plan = [known[name] for name in options.names or known]
    code = code_hash()
    if options.list:
        for measurement in plan:
            path = options.out / f"{measurement.result}.json"
            measured = "up to date" if code_of(path) == code else "of other code"
            state = measured if path.exists() else "missing"
            needs = f"{measurement.gpus} GPU  {measurement.seconds:4} s"
            print(f"{measurement.result:40}{needs}  {state}")
        return 0
    due = []
    for measurement in plan:
        if why := why_not(measurement, options.gpus, options.out, code):
            print(f"{measurement.result:40}{why}")
        else:
            due.append(measurement)
    deadline = time.monotonic() + 60 * options.minutes if options.minutes else None
    failed = False
    for line, ok in run(due, options.gpus, options.out, deadline):
        print(line, flush=True)
        failed = failed or not ok
    return 1 if failed else 0


def code_of(path: Path) -> str | None:
    """The hash of the code that a results file measured; None where it names none."""
    try:
        code = json.loads(path.read_text())["parents"].get("code")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return code if isinstance(code, str) else None


def why_not(measurement: Measurement, gpus: int, out: Path, code: str) -> str | None:
    """Why a measurement is not run, or None."""
    if code_of(out / f"{measurement.result}.json") == code:
        return "is up to date"
    if measurement.gpus > gpus:
        return f"needs {measurement.gpus} GPUs, and this machine has {gpus}"
    missing = [name for name in measurement.packages if importlib.util.find_spec(name) is None]
    return f"needs {', '.join(missing)}, not installed" if missing else None


class _Running(NamedTuple):
    measurement: Measurement
    process: subprocess.Popen[bytes]
    gpus: list[int]
    begin: float


def run(
    due: Sequence[Measurement], gpus: int, out: Path, deadline: float | None = None
) -> Iterator[tuple[str, bool]]:
    """Runs measurements on GPUs of their own, those that need most first.

    Args:
        due: what to run.
        gpus: how many there are; each serves one measurement at a time.
        out: the directory for results.
        deadline: when what still runs is stopped, by `time.monotonic`.

    Yields:
        A line for each beginning and end, and False for what failed or was stopped.
    """
    waiting = sorted(due, key=lambda m: (-m.gpus, -m.seconds))
    free, running = list(range(gpus)), list[_Running]()
    try:
        while waiting or running:
            late = deadline is not None and time.monotonic() > deadline
            # One that needs many GPUs is not overtaken: it would wait until all others are done.
            while waiting and not late and waiting[0].gpus <= len(free):
                measurement = waiting.pop(0)
                taken, free = free[: measurement.gpus], free[measurement.gpus :]
                running.append(_start(measurement, taken, out))
                on = ", ".join(map(str, taken))
                yield f"{measurement.result:40}started on GPU {on}", True
            time.sleep(POLL)
            for one in [one for one in running if late or one.process.poll() is not None]:
                running.remove(one)
                free = sorted(free + one.gpus)
                yield _ended(one, late, out)
            if late:
                for measurement in waiting:
                    yield f"{measurement.result:40}not started: no time is left", False
                waiting = []
    finally:
        for one in running:
            _stop(one.process)


def _start(measurement: Measurement, gpus: list[int], out: Path) -> _Running:
    module, *arguments = shlex.split(measurement.command)
    folder = _unfinished(measurement, out)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOG).open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", f"experiments.{module}", *arguments, "--out", str(folder)],
            cwd=ROOT,
            env=os.environ | only(gpus),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that its workers can be stopped with it
        )
    return _Running(measurement, process, gpus, time.monotonic())


def _unfinished(measurement: Measurement, out: Path) -> Path:
    """The absolute path of the folder for an experiment that has not succeeded yet."""
    return out.absolute() / "unfinished" / measurement.result


def _ended(one: _Running, late: bool, out: Path) -> tuple[str, bool]:
    """What became of a measurement, after stopping it if it is too late."""
    name, seconds = one.measurement.result, time.monotonic() - one.begin
    folder = _unfinished(one.measurement, out)
    if one.process.poll() is None and late:
        _stop(one.process)
        return f"{name:40}stopped after {seconds:.0f} s: no time is left", False
    if one.process.returncode:
        lines = (folder / LOG).read_text(errors="replace").strip().splitlines()
        why = lines[-1] if lines else f"exit code {one.process.returncode}"
        return f"{name:40}failed after {seconds:.0f} s ({folder / LOG}): {why}", False
    if not (folder / f"{name}.json").exists():
        return f"{name:40}wrote no {name}.json ({folder / LOG})", False
    (folder / LOG).unlink()
    for file in folder.iterdir():
        file.replace(out / file.name)
    folder.rmdir()
    return f"{name:40}measured in {seconds:.0f} s", True


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a process with all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
