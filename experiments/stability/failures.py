"""How often runs fail, and how sure that is.

    wilson     the interval of a share, from how many of how many
    tango      the interval of the difference between two shares of the same pairs
    mcnemar    the exact probability that they differ by chance as much as they do

A pair is a run of an arm and one of the baseline from the same seed, at the same learning rate.
Such runs begin with the same parameters and see the same batches, so they are not independent, as
Fisher's exact test assumes. Only the pairs in which one of the two fails tell the arms apart.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from experiments.study.statistics import LEVEL

BESIDE = 1e-9


class Rate(NamedTuple):
    """How many of how many, and the interval of the share."""

    count: int
    runs: int
    low: float
    high: float

    @property
    def share(self) -> float:
        """The share of the runs."""
        return self.count / self.runs


def wilson(count: int, runs: int) -> Rate:
    """The interval of a share that Wilson (1927) derived; it also holds near 0 and 1."""
    from scipy import stats

    if not 0 <= count <= runs or runs == 0:
        raise ValueError(f"{count} of {runs} runs is no share.")
    found = stats.binomtest(count, runs).proportion_ci(LEVEL, method="wilson")
    return Rate(count, runs, float(found.low), float(found.high))


Run = tuple[float, int]  # its learning rate and seed


class Paired(NamedTuple):
    """How often an arm and the baseline fail, over their pairs.

    Attributes:
        pairs: how many there are.
        both: in which both fail.
        only_own: in which only the arm fails.
        only_base: in which only the baseline fails.
        low: the lower end of the interval of `difference`.
        high: the upper end.
        p: the probability of such a difference by chance.
    """

    pairs: int
    both: int
    only_own: int
    only_base: int
    low: float
    high: float
    p: float

    @property
    def difference(self) -> float:
        """The arm's share of failures minus the baseline's."""
        return (self.only_own - self.only_base) / self.pairs


def paired(own: Mapping[Run, bool], base: Mapping[Run, bool]) -> Paired | None:
    """Compares the failures of the runs that an arm and the baseline have in common.

    Args:
        own: whether each run of the arm failed.
        base: the same of the baseline.

    Returns:
        None if they have no run in common.
    """
    outcomes = [(own[run], base[run]) for run in own.keys() & base.keys()]
    if not outcomes:
        return None
    both, only_own, only_base = map(outcomes.count, [(True, True), (True, False), (False, True)])
    low, high = tango(only_own, only_base, len(outcomes))
    p = mcnemar(only_own, only_base)
    return Paired(len(outcomes), both, only_own, only_base, low, high, p)


def mcnemar(only_one: int, only_other: int) -> float:
    """The two-sided p-value of McNemar's exact test, from the pairs in which one of two fails."""
    from scipy import stats

    differ = only_one + only_other
    return float(stats.binomtest(only_one, differ).pvalue) if differ else 1.0


def tango(only_one: int, only_other: int, pairs: int) -> tuple[float, float]:
    """The score interval of a difference of paired shares (Tango, 1998); it also holds near 0.

        (b - c - n d)^2 <= z^2 n (2 q + d (1 - d))

    d is the difference; b and c are the pairs in which one of two fails; n counts all pairs; q is
    the most likely share of pairs in which only the other fails, if the difference is d.

    Args:
        only_one: b.
        only_other: c.
        pairs: n.
    """
    from scipy import optimize, stats

    b, c, n = only_one, only_other, pairs
    if min(b, c) < 0 or b + c > n or n == 0:
        raise ValueError(f"{b} and {c} of {n} pairs are no shares.")
    z = stats.norm.ppf((1 + LEVEL) / 2)

    def rejected(d: float) -> float:
        """The left side minus the right one: positive outside of the interval."""
        linear = (2 * n - b + c) * d - b - c
        root = math.sqrt(max(linear**2 + 8 * n * c * d * (1 - d), 0.0))
        q = (root - linear) / (4 * n)
        return (b - c - n * d) ** 2 - z**2 * n * (2 * q + d * (1 - d))

    found = (b - c) / n
    # Just beside the difference that was found, which is a root itself if no pair differs.
    low = -1.0 if found == -1 else optimize.brentq(rejected, -1.0, found - BESIDE)
    high = 1.0 if found == 1 else optimize.brentq(rejected, found + BESIDE, 1.0)
    return float(low), float(high)
