"""Whether a signal announces a divergence: sharpness, gradient norm or loss.

An alarm sounds when a signal is above its own recent past by a factor that 5 % of the runs that
train ever reach. It needs only the run itself, so it shows what a user can do.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Float

from experiments.stability.conditions import Run
from experiments.stability.curves import Signals

SIGNALS = Signals._fields
FALSE_ALARMS = 0.05  # the share of runs that train in which an alarm may sound
PAST = 10  # points of a signal that an alarm compares with


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


def announced(
    diverged: Float[np.ndarray, "D T"], onsets: Sequence[int], trained: Float[np.ndarray, "R T"]
) -> float:
    """The share of divergences before which an alarm sounds; NaN without runs of both kinds.

    Args:
        diverged: the signal of runs that diverge.
        onsets: the point of each divergence.
        trained: the signal of runs that train.
    """
    if len(diverged) == 0 or len(trained) == 0:
        return math.nan
    highest = np.sort(rises(trained).max(axis=1))
    threshold = highest[len(highest) - 1 - math.floor(FALSE_ALARMS * len(highest))]
    pairs = zip(rises(diverged), onsets, strict=True)
    return float(np.mean([np.any(signal[:onset] > threshold) for signal, onset in pairs]))


def announced_by(signal: str, runs: Iterable[Run], every: int) -> float:
    """The share that a signal announces, with one threshold for all runs.

    Args:
        signal: a name in `SIGNALS`.
        runs: of all arms and learning rates.
        every: steps between two points of the signal.
    """
    runs, which = list(runs), SIGNALS.index(signal)
    onsets = [run.events.onset // every for run in runs if run.events.onset is not None]
    diverged = [run.signals[which] for run in runs if run.events.onset is not None]
    trained = [run.signals[which] for run in runs if run.events.outcome == "trained"]
    return announced(np.array(diverged), onsets, np.array(trained))
