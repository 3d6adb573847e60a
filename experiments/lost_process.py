"""One of eight processes is killed, and the run goes on with four.

Claim: a run that loses a process, and goes on with fewer, has the losses of one that lost none.

    python -m experiments.lost_process                   a GPU for each process, or a CPU device
    python -m experiments.lost_process --processes 2 --left 1

`llama_tiny` trains with parameters and moments sharded over all processes, and saves every tenth
step. Once it is halfway to its end a process is killed, and the others end by themselves, within
JAX's 100 seconds. The same command then goes on with fewer processes, from the last checkpoint.
Until there no bit of a loss differs; from there on, rounding does.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

from experiments.command import ROOT, parser_of
from experiments.workers import count_gpus

SAVED_EVERY = 10
LIMIT = 900.0  # seconds of all processes together


def main() -> None:
    """Trains without a loss and with one, prints what differs, and writes the results."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--processes", type=int, default=8, help="of which one is killed")
    add("--left", type=int, default=4, help="how many then go on")
    add("--steps", type=int, default=60, help="of the run")
    add("--work", type=Path, default=ROOT / "out" / "lost_process", help="folder of the two runs")
    options = parser.parse_args()
    from experiments import records

    shutil.rmtree(options.work, ignore_errors=True)
    options.work.mkdir(parents=True)
    found = measure(options.processes, options.left, options.steps, options.work)
    print(
        f"The others ended after {found['ended_seconds']:.0f} s. {options.left} processes went on "
        f"from step {found['resumed']}; from there losses differ by at most {found['after']:.1e}, "
        f"before by {found['before']:.1e}."
    )
    asked = {name: getattr(options, name) for name in ("processes", "left", "steps")}
    records.write(options.out / "lost_process.json", {**asked, **found})


def measure(processes: int, left: int, steps: int, work: Path) -> dict[str, Any]:
    """The losses of both runs, and how they differ."""
    with all_of(processes, steps, work / "whole") as running:
        wait(running)
    whole = losses(work / "whole")
    print(f"{processes} processes took {steps} steps: loss {whole[-1]:.4f}", flush=True)
    with all_of(processes, steps, work / "lost") as running:
        until(lambda: len(losses(work / "lost")) > steps // 2, running)
        running[-1].kill()
        begin = time.monotonic()
        for process in running:
            process.wait(LIMIT)
        seconds = time.monotonic() - begin
    saved = max(int(folder.name) for folder in (work / "lost" / "checkpoints").glob("[0-9]*"))
    print(f"One was killed; the last checkpoint is of step {saved}", flush=True)
    with all_of(left, steps, work / "lost") as running:
        wait(running)
    resumed = losses(work / "lost")
    apart = [abs(a / b - 1) for a, b in zip(resumed, whole, strict=True)]
    return {
        "ended_seconds": seconds,
        "resumed": saved,
        "before": max(apart[:saved]),
        "after": max(apart[saved:]),
        "losses": {"whole": whole, "resumed": resumed},
    }


@contextlib.contextmanager
def all_of(count: int, steps: int, out: Path) -> Any:
    """`count` processes of one run, each with a device of its own; what is left of them is killed.

    Each writes to a log beside the run's folder.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{found.getsockname()[1]}"
    settings = {"total_steps": steps, "checkpoint.every": SAVED_EVERY, "evaluation.every": 0}
    command = [sys.executable, "-m", "coat_jax", "train", "llama_tiny", "--out", str(out)]
    command += [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    gpus = count_gpus()
    if gpus and gpus < count:
        raise SystemExit(f"{count} processes need {count} GPUs, and there are {gpus}.")
    running = []
    with contextlib.ExitStack() as stack:
        for index in range(count):
            variables = {
                "JAX_COORDINATOR_ADDRESS": address,
                "JAX_PROCESS_COUNT": str(count),
                "JAX_PROCESS_ID": str(index),
            } | ({"JAX_LOCAL_DEVICE_IDS": str(index)} if gpus else {})
            log: IO[bytes] = stack.enter_context(
                (out.parent / f"{out.name}_{count}_{index}.log").open("wb")
            )
            process = subprocess.Popen(
                command, env=os.environ | variables, stdout=log, stderr=subprocess.STDOUT
            )
            stack.callback(process.kill)
            running.append(process)
        yield running


def wait(running: list[subprocess.Popen[bytes]]) -> None:
    """Returns when all have ended well."""
    for process in running:
        if code := process.wait(LIMIT):
            raise SystemExit(f"A process ended with {code}: see the logs in --work.")


def until(condition: Any, running: list[subprocess.Popen[bytes]]) -> None:
    """Returns when the condition holds, while all run."""
    while not condition():
        if any(process.poll() is not None for process in running):
            raise SystemExit("A process ended too soon: see the logs in --work.")
        time.sleep(0.02)


def losses(folder: Path) -> list[float]:
    """The losses of all steps so far."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["loss"] for line in lines if line.endswith("}")]


if __name__ == "__main__":
    main()
