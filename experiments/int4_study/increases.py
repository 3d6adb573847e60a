"""How much quantization increases the held-out loss, in nats, and what that depends on.

    increase    loss quantized - loss in BF16               of the same parameters
    excess      increase of a network - that of the network of the same seed trained in BF16
    ratio       increase of one way / that of another       the geometric mean over seeds

Intervals are of the mean over seeds, by Student's t.
"""

import math
from typing import NamedTuple

import numpy as np

from experiments.int4_study.ways import REFERENCE
from experiments.loss_study.conditions import baselines_of
from experiments.row_files import Row
from experiments.study.statistics import Cost, Effect, compare, cost_of, holm


class Ratio(NamedTuple):
    """A ratio with its interval; NaN where it is not known."""

    mean: float
    low: float
    high: float


def increase(row: Row, way: str) -> float:
    """The increase in one run."""
    quantized = row["quantized"]
    return float(np.mean(quantized[way]) - np.mean(quantized[REFERENCE]))


def ways_of(rows: list[Row]) -> list[str]:
    """All ways of these runs, without the one that quantizes nothing."""
    return [way for way in rows[0]["quantized"] if way != REFERENCE]


def by_arm(rows: list[Row]) -> dict[str, list[Row]]:
    """The runs of each arm, those of baselines first."""
    baselines = baselines_of(rows)
    arms = sorted({row["arm"] for row in rows}, key=lambda arm: (arm not in baselines, arm))
    return {arm: [row for row in rows if row["arm"] == arm] for arm in arms}


def mean_increase(rows: list[Row], way: str) -> Cost:
    """The increase over the seeds of an arm."""
    return cost_of([increase(row, way) for row in rows])


def ratio(rows: list[Row], way: str, other: str) -> Ratio:
    """The ratio of two increases over the seeds of an arm, if all are positive."""
    pairs = [(increase(row, way), increase(row, other)) for row in rows]
    if min(map(min, pairs)) <= 0:
        return Ratio(math.nan, math.nan, math.nan)
    mean, half = cost_of([math.log(ours / theirs) for ours, theirs in pairs])
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def excesses(rows: list[Row]) -> dict[tuple[str, str], Effect]:
    """The excess of each arm in each way, by (arm, way); `holm` is over all of them."""
    found = {
        (arm, way): effect for way in ways_of(rows) for arm, effect in _compare(rows, way).items()
    }
    corrected = holm([effect.p for effect in found.values()])
    return {
        key: effect._replace(holm=p)
        for (key, effect), p in zip(found.items(), corrected, strict=True)
    }


def _compare(rows: list[Row], way: str) -> dict[str, Effect]:
    """`compare` takes logarithms, so the difference of increases is that of their exponentials."""
    return compare(rows, baselines_of(rows), lambda row: math.exp(increase(row, way))).effects
