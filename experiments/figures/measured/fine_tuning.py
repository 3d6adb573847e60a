"""What FP8 costs a network that is tuned on other text: fine_tuning."""

import functools

from experiments.figures.measured.files import FOLDER
from experiments.figures.measured.loss_study import estimated_minutes, percent
from experiments.fine_tuning import int8, show
from experiments.loss_study import results, statistics
from experiments.loss_study.arm import Settings
from experiments.loss_study.statistics import Comparison, Row

MODEL, SMALL_MODEL = "40M", "tiny"  # sizes: of most runs, and of those that a CPU trained


@functools.cache
def runs(size: str = MODEL) -> list[Row]:
    """All runs of a size."""
    return [row for row in results.read([FOLDER / show.FILE]) if row["size"] == size]


@functools.cache
def effects(held_out: str | None = None, size: str = MODEL) -> Comparison:
    """What each way costs in training loss, relative to tuning in BF16, or in held-out loss.

    `held_out` is the precision of that evaluation: see `statistics.held_out`.
    """
    tuned = [row for run in runs(size) for row in show.ways_of(run)]
    baselines = results.baselines_of(tuned)
    if held_out is None:
        return statistics.compare(tuned, baselines)
    return statistics.compare(tuned, baselines, statistics.held_out(held_out))


def cost(way: str, held_out: str | None = None, size: str = MODEL) -> tuple[float, float]:
    """What a way costs, and half of its interval, in percent."""
    return percent(effects(held_out, size).effects[way], digits=3)


def floor() -> float:
    """The standard deviation between two baselines of one seed, in percent."""
    return 100 * effects().noise.apart


def gain() -> float:
    """By how much tuning in BF16 lowers the held-out loss, in percent."""
    return 100 * show.gain(runs())


def million_tokens() -> tuple[float, float]:
    """How many a run reads before it is tuned and while it is, in millions."""
    run = runs()[0]
    tuned = show.ways_of(run)[0]
    before, while_tuned = (
        row["settings"]["steps"] * row["settings"]["batch"] * row["settings"]["sequence"] / 1e6
        for row in (run, tuned)
    )
    return before, while_tuned


def minutes(*, seeds: int) -> float:
    """How long the runs of `--int8` take on one H200, with their text, by the study's estimate."""
    settings = Settings(**runs()[0]["settings"])
    return estimated_minutes(MODEL, seeds * int8.cost_of(settings))
