"""How often runs fail, how sure that is, and how much the learning rate matters.

    wilson       the interval of a share, from how many of how many
    fisher       the exact probability that two shares differ by chance as much as they do
    sensitivity  how much worse runs end, on average over learning rates, than at the best one

Arms have the same seeds and learning rates. `fisher` treats their runs as independent, which they
are not: what hits a seed in one arm may hit it in another. That is conservative, since shared luck
makes a difference by chance less likely. The p-values of several arms are corrected by Holm's
method.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments.loss_study.statistics import quantile

LEVEL = 0.95


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


def fisher(count: int, runs: int, other_count: int, other_runs: int) -> float:
    """The two-sided p-value of Fisher's exact test."""
    from scipy import stats

    if not (0 <= count <= runs and 0 <= other_count <= other_runs):
        raise ValueError(f"{count} of {runs} and {other_count} of {other_runs} are no shares.")
    table = [[count, runs - count], [other_count, other_runs - other_count]]
    return float(stats.fisher_exact(table).pvalue)


class Band(NamedTuple):
    """The final losses of many seeds: their median, and the quantiles that 80 % are between."""

    median: float
    low: float
    high: float


def band(final: Sequence[float]) -> Band:
    """The band of final losses, which may be infinite."""
    # Not interpolated: between a number and infinity there is none.
    low, median, high = np.quantile(final, (0.1, 0.5, 0.9), method="inverted_cdf")
    return Band(float(median), float(low), float(high))


def sensitivity(final: Mapping[float, Sequence[float]], first: float) -> float:
    """The learning rate sensitivity of Wortsman et al. (arXiv 2309.14322), in nats.

    The mean over learning rates of the median final loss, capped at that of the first step, less
    the smallest of these medians. The learning rates are evenly spaced in their logarithm.

    Args:
        final: losses by learning rate.
        first: the loss of a model that was not trained.
    """
    medians = [min(band(losses).median, first) for losses in final.values()]
    return float(np.mean(medians) - min(medians))


class Mean(NamedTuple):
    """A mean over seeds, and half of its 95 % interval."""

    mean: float
    half: float


def excess(own: Mapping[int, float], base: Mapping[int, float]) -> Mean | None:
    """How far losses are above those of the baseline with the same seeds, as a share of them.

    Args:
        own: losses by seed.
        base: losses of the baseline by seed.

    Returns:
        The mean log of their ratio. None with fewer than two seeds, or if a loss is infinite.
    """
    pairs = np.array([(own[seed], base[seed]) for seed in own if seed in base])
    if len(pairs) < 2 or not np.isfinite(pairs).all():
        return None
    ratios = np.log(pairs[:, 0] / pairs[:, 1])
    error = ratios.std(ddof=1) / len(ratios) ** 0.5
    return Mean(float(ratios.mean()), float(quantile(len(ratios) - 1) * error))
