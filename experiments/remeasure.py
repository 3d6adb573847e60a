"""Repeats measurements that need GPUs, so that all published figures are of today's code.

    python -m experiments.remeasure                     what is not of today's code
    python -m experiments.remeasure --list              what there is, and of which code it is
    python -m experiments.remeasure layer_speed --out /tmp/results

Each measurement is an experiment with a process and GPUs of its own. Where there are enough GPUs,
several run side by side, but only one of those that need more than one GPU: each would disturb the
other's communication. A machine with fewer GPUs than an experiment needs leaves it out. A results
file names the code that it ran (see `measured_code`), and only a change of that code outdates it.

A second call continues where the first one ended. What an experiment prints and writes is in
OUT/unfinished/NAME until it succeeds, and the cases that it finished are in OUT/unfinished/cases:
they are not measured again while code, packages and the kind of GPU are the same. The experiment
locks that folder, so that no second call measures the same at the same time.
"""

import contextlib
import fcntl
import importlib.util
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import NamedTuple

from experiments import measured_cases
from experiments.command import parser_of
from experiments.essence import ROOT
from experiments.measurements import PLAN, Measurement, cases_file, outdated
from experiments.workers import count_gpus, only

LOG = "log.txt"
POLL = 0.2  # seconds
COLUMN = 48  # width of the names of results


def main() -> int:
    """Runs what is not of today's code yet; the exit code is 0 if nothing failed."""
    parser = parser_of(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="results (default: all)")
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    parser.add_argument("--gpus", type=int, default=count_gpus(), help="to use (%(default)s)")
    parser.add_argument("--minutes", type=float, help="stop what is not done by then")
    options = parser.parse_args()
    if options.minutes is not None and not options.minutes > 0:
        parser.error(f"--minutes {options.minutes:g} must be above 0.")
    if options.out.exists() and not options.out.is_dir():
        parser.error(f"--out {options.out} is not a folder.")
    known = {measurement.result: measurement for measurement in PLAN}
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"{unknown[0]!r} is none of {', '.join(known)}.")
    plan = [known[name] for name in dict.fromkeys(options.names or known)]
    if options.list:
        for measurement in plan:
            state = outdated(measurement, options.out) or "up to date"
            begun = measured_cases.valid(cases_file(measurement, options.out))
            kept = f"; cases finished: {len(begun)}" if begun else ""
            needs = f"{measurement.gpus} GPU  {measurement.seconds:4} s"
            print(f"{measurement.result:{COLUMN}}{needs}  {state}{kept}")
        return 0
    due = []
    for measurement in plan:
        if why := why_not(measurement, options.gpus, options.out):
            print(f"{measurement.result:{COLUMN}}{why}")
        else:
            due.append(measurement)
    deadline = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    failed = False
    # The default is to end at once, and experiments would go on.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for line, ok in run(due, options.gpus, options.out, deadline):
            print(line, flush=True)
            failed = failed or not ok
    except KeyboardInterrupt:
        print("Stopped, and what ran with it. Finished cases are not measured again.")
        return 130
    except OSError as error:
        print(f"Stopped: {error}")
        return 3
    _forget(options.out)
    return 1 if failed else 0


def why_not(measurement: Measurement, gpus: int, out: Path) -> str | None:
    """Why a measurement is not run, or None."""
    if outdated(measurement, out) is None:
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
    lock: int  # an open file


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
    takes = {measurement: _seconds(measurement, out) for measurement in waiting}
    begun = {one for one in waiting if measured_cases.valid(cases_file(one, out))}
    free, running = list(range(gpus)), list[_Running]()
    try:
        while waiting or running:
            left = math.inf if deadline is None else deadline - time.monotonic()
            # Smaller measurements do not overtake one that needs many GPUs: it would wait to the
            # end.
            while left > 0 and (ready := _undisturbing(waiting, running)):
                if ready[0].gpus > len(free):
                    break
                alike = [one for one in ready if one.gpus == ready[0].gpus]
                chosen = _first_that_fits(alike, takes, begun, left)
                if chosen is None:
                    break
                waiting.remove(chosen)
                if (lock := _lock(_unfinished(chosen, out))) is None:
                    yield f"{chosen.result:{COLUMN}}is being measured by another process", False
                    continue
                taken, free = free[: chosen.gpus], free[chosen.gpus :]
                with _uninterrupted():  # so that each process that began is in `running`
                    running.append(_start(chosen, taken, out, lock))
                on = ", ".join(map(str, taken))
                yield f"{chosen.result:{COLUMN}}started on GPU {on}", True
            time.sleep(POLL)
            late = deadline is not None and time.monotonic() > deadline
            for one in [one for one in running if late or one.process.poll() is not None]:
                running.remove(one)
                free = sorted(free + one.gpus)
                ended = _ended(one, late, out)
                os.close(one.lock)
                yield ended
            left = math.inf if deadline is None else deadline - time.monotonic()
            for measurement in waiting.copy():
                if _first_that_fits([measurement], takes, begun, left) is not None:
                    continue
                waiting.remove(measurement)
                yield f"{measurement.result:{COLUMN}}not started: too little time is left", False
    finally:
        for one in running:
            _stop(one.process)
            os.close(one.lock)


def _undisturbing(
    waiting: Sequence[Measurement], running: Sequence[_Running]
) -> Sequence[Measurement]:
    """What may begin now: while one measurement has several GPUs, only those of one GPU."""
    communicates = any(one.measurement.gpus > 1 for one in running)
    return [one for one in waiting if one.gpus == 1] if communicates else waiting


def _seconds(measurement: Measurement, out: Path) -> float:
    """Roughly what is left to measure."""
    finished = measured_cases.valid(cases_file(measurement, out))
    done = sum(case["seconds"] for case in finished)
    return max(measurement.seconds - done, measurement.case or measurement.seconds)


def _first_that_fits(
    waiting: Sequence[Measurement],
    takes: Mapping[Measurement, float],
    begun: Set[Measurement],
    left: float,
) -> Measurement | None:
    """A measurement that ends in the time left, or else one with a case that does.

    The last choice is one that has finished cases: if it lacks none, it ends at once.
    """
    ends = (one for one in waiting if takes[one] <= left)
    begins = (one for one in waiting if one.case is not None and one.case <= left)
    continues = (one for one in waiting if one in begun and left > 0)
    return next(ends, None) or next(begins, None) or next(continues, None)


def _lock(folder: Path) -> int | None:
    """Makes a folder, and opens it as the only process that does; None if another one has."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delays SIGINT and SIGTERM until the block ends."""
    received = list[int]()
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {one: signal.signal(one, lambda number, _: received.append(number)) for one in signals}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
        for number in received:
            signal.raise_signal(number)


def _start(measurement: Measurement, gpus: list[int], out: Path, lock: int) -> _Running:
    module, *arguments = shlex.split(measurement.command)
    folder = _unfinished(measurement, out)
    command = [sys.executable, "-m", f"experiments.{module}", *arguments, "--out", str(folder)]
    cases = {measured_cases.FILE: str(cases_file(measurement, out))}
    with (folder / LOG).open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | only(gpus) | cases,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that its workers can be stopped with it
            pass_fds=[lock],  # which it holds even if this process is killed
        )
    return _Running(measurement, process, gpus, time.monotonic(), lock)


def _unfinished(measurement: Measurement, out: Path) -> Path:
    """The absolute path of the folder for an experiment that has not succeeded yet."""
    return out.absolute() / "unfinished" / measurement.result


def _forget(out: Path) -> None:
    """Removes finished cases all of whose measurements are up to date."""
    needed = {cases_file(one, out) for one in PLAN if outdated(one, out)}
    for file in {cases_file(one, out) for one in PLAN} - needed:
        file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # something is left, or never was there
        (out / "unfinished" / "cases").rmdir()
        (out / "unfinished").rmdir()


def _ended(one: _Running, late: bool, out: Path) -> tuple[str, bool]:
    """What became of a measurement, after stopping it if it is too late."""
    name, seconds = one.measurement.result, time.monotonic() - one.begin
    folder = _unfinished(one.measurement, out)
    if one.process.poll() is None and late:
        _stop(one.process)
        finished = len(measured_cases.valid(cases_file(one.measurement, out)))
        kept = f"; cases finished: {finished}" if one.measurement.case else ""
        return f"{name:{COLUMN}}stopped after {seconds:.0f} s: no time is left{kept}", False
    if one.process.returncode:
        lines = (folder / LOG).read_text(errors="replace").strip().splitlines()
        why = lines[-1] if lines else f"exit code {one.process.returncode}"
        return f"{name:{COLUMN}}failed after {seconds:.0f} s ({folder / LOG}): {why}", False
    if not (folder / f"{name}.json").exists():
        return f"{name:{COLUMN}}wrote no {name}.json ({folder / LOG})", False
    (folder / LOG).unlink()
    for file in folder.iterdir():
        file.replace(out / file.name)
    folder.rmdir()
    return f"{name:{COLUMN}}measured in {seconds:.0f} s", True


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a process with all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
