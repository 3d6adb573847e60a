"""Whether a signal announces a divergence: sharpness, gradient norm or loss.

An alarm sounds when a signal is above its own recent past by a factor that 5 % of the runs that
train ever reach. It needs only the run itself, so it shows what a user can do. The lead time is
how many steps before the divergence it sounds.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from experiments.stability.conditions import Run
from experiments.stability.curves import Signals

SIGNALS = Signals._fields
FALSE_ALARMS = 0.05
PAST = 10  # points of a signal that an alarm compares with


class Lead(NamedTuple):
    """How early alarms sound.

    Attributes:
        median: of the points between alarm and divergence; a missed divergence counts as 0.
        warned: the share of divergences before which an alarm sounds.
        false_alarms: the share of runs that train in which one sounds.
        runs: that diverge.
    """

    median: float
    warned: float
    false_alarms: float
    runs: int


def rises(signals: Float[np.ndarray, "R T"]) -> Float[np.ndarray, "R T"]:
    """The log of each signal over the median of the `PAST` points before it.

    The first points, which have no such past, are 0. A number that is not finite is infinite.
    """
    result = np.zeros(signals.shape)
    if signals.shape[1] < PAST:
        return result
    logs = np.log(np.where(np.isfinite(signals), np.maximum(signals, 1e-30), np.inf))
    past = np.lib.stride_tricks.sliding_window_view(logs, PAST, axis=1)[:, :-1]
    usual = np.median(past, axis=-1)
    usual = np.where(np.isfinite(usual), usual, 0.0)  # infinite for long: so is the rise
    result[:, PAST:] = logs[:, PAST:] - usual
    return result


def lead(
    diverged: Float[np.ndarray, "D T"],
    onsets: Sequence[int],
    trained: Float[np.ndarray, "R T"],
    false_alarms: float = FALSE_ALARMS,
) -> Lead:
    """The lead time of alarms, at the smallest threshold with at most so many false ones.

    Args:
        diverged: the signal of runs that diverge.
        onsets: the point of each divergence.
        trained: the signal of runs that train.
        false_alarms: the share of these in which an alarm may sound.
    """
    if len(diverged) == 0 or len(trained) == 0:
        return Lead(math.nan, math.nan, math.nan, len(diverged))
    highest = np.sort(rises(trained).max(axis=1))
    allowed = math.floor(false_alarms * len(highest))
    threshold = highest[len(highest) - 1 - allowed]
    times = []
    for signal, onset in zip(rises(diverged), onsets, strict=True):
        alarms = np.flatnonzero(signal[:onset] > threshold)
        times.append(onset - int(alarms[0]) if alarms.size else 0)
    return Lead(
        median=float(np.median(times)),
        warned=float(np.mean(np.array(times) > 0)),
        false_alarms=float(np.mean(highest > threshold)),
        runs=len(times),
    )


def lead_of(runs: Iterable[Run], signal: str, every: int) -> Lead:
    """The lead time of a signal in steps, with one threshold for all runs."""
    runs, which = list(runs), SIGNALS.index(signal)
    diverged = [run for run in runs if run.events.onset is not None]
    trained = [run for run in runs if run.events.outcome == "trained"]
    found = lead(
        np.array([run.signals[which] for run in diverged]),
        [int(run.events.onset or 0) // every for run in diverged],
        np.array([run.signals[which] for run in trained]),
    )
    return found._replace(median=found.median * every)
