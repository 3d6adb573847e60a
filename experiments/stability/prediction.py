"""Whether a signal predicts divergence: sharpness, gradient norm or loss.

Two questions, about runs of one arm and learning rate, some of which diverge:

    area        k steps before a run diverges, how often is its signal above that of a run that
                trains, at the same step? The area under the ROC curve: 0.5 is chance, 1 is certain.
    lead time   an alarm sounds when a signal is above its own recent past by a factor that 5 % of
                the runs that train ever reach. How many steps before the divergence is that?

The area compares a run with others of the same arm and learning rate at the same step: it measures
how much a signal knows. The alarm needs only the run itself: it shows what a user can do.

Each pair of a diverged run i and a trained run j is 1, 0, or 1/2 for a tie; the area is the mean
over pairs, and its standard error is that of DeLong et al. (1988), from the means of rows and of
columns. Areas of several arms and learning rates are averaged by their number of pairs.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from experiments.stability.results import Sample
from experiments.stability.train import Signals

SIGNALS = Signals._fields
FALSE_ALARMS = 0.05
PAST = 10  # points of a signal that an alarm compares with


class Area(NamedTuple):
    """The area under the ROC curve, its standard error, and the pairs that it is the mean of."""

    mean: float
    error: float
    pairs: int


def area(pairs: Float[np.ndarray, "diverged trained"]) -> Area:
    """The mean over pairs, and its standard error; NaN with a single run on a side."""
    diverged, trained = pairs.shape
    if 0 in pairs.shape:
        return Area(math.nan, math.nan, 0)
    if 1 in pairs.shape:
        return Area(float(pairs.mean()), math.nan, pairs.size)
    by_row = np.var(pairs.mean(axis=1), ddof=1) / diverged
    by_column = np.var(pairs.mean(axis=0), ddof=1) / trained
    return Area(float(pairs.mean()), math.sqrt(by_row + by_column), pairs.size)


def above(
    diverged: Float[np.ndarray, "D T"],
    onsets: Sequence[int],
    trained: Float[np.ndarray, "R T"],
    before: int,
) -> Float[np.ndarray, "D R"]:
    """The pairs: whether a signal is above that of a run that trains, `before` points earlier.

    Divergences that come too early for that have no row.

    Args:
        diverged: the signal of runs that diverge.
        onsets: the point of each divergence.
        trained: the signal of runs that train.
        before: how many points before the divergence.
    """
    rows = []
    for signal, onset in zip(diverged, onsets, strict=True):
        at = onset - before
        if at >= 0:
            # A number that is not finite is above all others.
            own, other = np.nan_to_num(signal[at], nan=np.inf), trained[:, at]
            rows.append((own > other) + 0.5 * (own == other))
    return np.array(rows).reshape(len(rows), len(trained))


def pooled(areas: Iterable[Area]) -> Area:
    """The mean of areas from different runs, weighted by their pairs.

    Areas whose error is unknown are left out.
    """
    known = [one for one in areas if not math.isnan(one.error)]
    pairs = sum(one.pairs for one in known)
    if pairs == 0:
        return Area(math.nan, math.nan, 0)
    mean = sum(one.pairs * one.mean for one in known) / pairs
    error = math.sqrt(sum((one.pairs * one.error) ** 2 for one in known)) / pairs
    return Area(mean, error, pairs)


class Lead(NamedTuple):
    """How early alarms sound.

    Attributes:
        median: of the points between alarm and divergence; a missed divergence counts as 0.
        warned: the share of divergences before which an alarm sounds.
        false_alarms: the share of runs that train in which one sounds.
        factor: by which a signal must rise.
        runs: that diverge.
    """

    median: float
    warned: float
    false_alarms: float
    factor: float
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
        return Lead(math.nan, math.nan, math.nan, math.nan, len(diverged))
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
        factor=float(np.exp(threshold)),
        runs=len(times),
    )


# --- Of many runs ----------------------------------------------------------------------------


class Parts(NamedTuple):
    """A signal of the runs of a sample, by what became of them."""

    diverged: Float[np.ndarray, "D T"]
    onsets: list[int]
    trained: Float[np.ndarray, "R T"]


def parts_of(sample: Sample, signal: str, every: int) -> Parts:
    """Diverged and trained runs of a sample; onsets in points of the signal."""
    values = getattr(sample.signals, signal)
    outcomes = np.array([one.outcome for one in sample.events])
    onsets = [one.onset // every for one in sample.events if one.onset is not None]
    return Parts(values[outcomes == "diverged"], onsets, values[outcomes == "trained"])


def area_of(samples: Iterable[Sample], signal: str, every: int, before: int) -> Area:
    """The area of a signal so many steps before divergence, over all samples together."""
    parts = [parts_of(sample, signal, every) for sample in samples]
    return pooled(area(above(*part, round(before / every))) for part in parts)


def lead_of(samples: Iterable[Sample], signal: str, every: int) -> Lead:
    """The lead time of a signal in steps, with one threshold for all samples."""
    parts = [parts_of(sample, signal, every) for sample in samples]
    if not parts:
        return Lead(math.nan, math.nan, math.nan, math.nan, 0)
    found = lead(
        np.concatenate([part.diverged for part in parts]),
        [onset for part in parts for onset in part.onsets],
        np.concatenate([part.trained for part in parts]),
    )
    return found._replace(median=found.median * every)
