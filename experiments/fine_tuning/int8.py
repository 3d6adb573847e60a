"""One run of `fine_tuning --int8`, in a process of its own: INT8 forward products against FP8.

    python -m experiments.fine_tuning.int8 JOB.json

It trains, tunes and measures as `run` does, in fewer ways.
"""

from typing import Any

from experiments.fine_tuning import run as tuning
from experiments.fine_tuning.run import Found, tuned
from experiments.fine_tuning.ways import INT8
from experiments.loss_study.arm import Settings
from experiments.loss_study.run import Job, work
from experiments.row_files import Row


def main() -> None:
    """Trains, tunes, and writes the row unless it was stopped."""
    work(run, __doc__)


def row_of(*arguments: Any) -> Row:
    """A row before it is measured: that of `run` for these ways."""
    return tuning.row_of(*arguments, of=INT8)


def cost_of(settings: Settings) -> float:
    """A run, in tokens that are trained on."""
    return tuning.cost_of(settings, of=INT8)


def run(job: Job, stopped: list[int]) -> Found | None:
    """What was measured; None if somebody wrote to `stopped` before it was complete."""
    tuner = tuned(job, stopped, INT8)
    return None if tuner is None else tuner.row()


if __name__ == "__main__":
    main()
