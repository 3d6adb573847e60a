"""How much more loss each arm has than the baselines, with intervals.

Within a seed all arms share initial parameters and batches. The log of an arm's loss is therefore
compared with that of the baselines of the same seed, or of the same start where a seed has several
(`start_of`). Baselines are several runs of each seed that differ by rounding only. The mean of the
differences over seeds is the effect of the arm, and their spread gives its interval. Spreads are
not pooled, because some arms spread ten times as much as others. By chance, the runs of a few seeds
may lie closer together than runs that differ by rounding only. An interval is therefore never
narrower than the noise floor makes it, which comes from the baselines alone.

Effects are relative: 0.001 is 0.1 % more loss.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from experiments.row_files import Row

LEVEL = 0.95
FINAL = 0.1  # the share of a run whose mean is its final loss


class Effect(NamedTuple):
    """What an arm costs in loss, relative to the baselines.

    Attributes:
        mean: over seeds.
        half: half the width of its interval, the noise floor included; NaN for a single seed.
        p: of no effect at all; NaN for a single seed.
        holm: the same, corrected for the number of arms.
        seeds: how many.
    """

    mean: float
    half: float
    p: float
    holm: float
    seeds: int

    def __str__(self) -> str:
        return str(Cost(self.mean, self.half))


class Cost(NamedTuple):
    """The mean of differences between pairs of runs.

    Attributes:
        mean: over seeds.
        half: half the width of its interval; NaN for a single seed.
    """

    mean: float
    half: float

    def __str__(self) -> str:
        half = "?" if math.isnan(self.half) else f"{100 * self.half:.3f}"
        return f"{100 * self.mean:+.3f} % ± {half}"


class Noise(NamedTuple):
    """Differences that mean nothing.

    Attributes:
        floor: the standard deviation of a baseline within its seed.
        floor_freedom: its degrees of freedom.
    """

    floor: float
    floor_freedom: int

    @property
    def apart(self) -> float:
        """The standard deviation of the difference between two baselines of a seed."""
        return math.sqrt(2) * self.floor

    def error(self, seeds: int, baselines: float) -> float:
        """The standard error of a mean difference over `seeds`, of runs that differ by rounding."""
        if self.floor_freedom == 0 or seeds == 0:
            return math.nan
        return self.floor * math.sqrt(1 / seeds + 1 / (seeds * baselines))

    def band(self, seeds: int, baselines: float) -> float:
        """The largest mean difference over `seeds` that rounding alone explains."""
        error = self.error(seeds, baselines)
        return error if math.isnan(error) else quantile(self.floor_freedom) * error


class Comparison(NamedTuple):
    """All arms under equal conditions."""

    effects: dict[str, Effect]
    noise: Noise
    baselines: float  # for each start, on average


def start_of(row: Row) -> tuple[int, str | None]:
    """What comparable runs begin from: their seed, and a trained network if one is named.

    Two networks that were trained from one seed may differ by more than what is measured.
    """
    return row["seed"], row.get("network")


def final(row: Row) -> float:
    """The training loss at the end of a run."""
    losses = row["losses"]
    return float(np.mean(losses[-max(round(FINAL * len(losses)), 1) :]))


def held_out(forward: str) -> Callable[[Row], float]:
    """The held-out loss under a precision of the forward pass: "own", "bf16" or "coat"."""
    return lambda row: float(np.mean(row["held_out"][forward]))


def compare(
    rows: list[Row], baselines: Iterable[str], loss: Callable[[Row], float] = final
) -> Comparison:
    """The effect of each arm, from the starts that have a baseline.

    Two runs of one arm and seed count as their mean.

    Args:
        rows: runs under equal conditions, baselines among them.
        baselines: arms that differ by rounding only.
        loss: of a run.
    """
    reference = set(baselines)
    base: dict[Any, list[float]] = defaultdict(list)
    for row in rows:
        if row["arm"] in reference:
            base[start_of(row)].append(math.log(loss(row)))
    gaps: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if alike := base.get(start_of(row)):
            gap = math.log(loss(row)) - float(np.mean(alike))
            gaps[row["arm"]][row["seed"]].append(gap)
    rest = [gap for arm in gaps.keys() & reference for runs in gaps[arm].values() for gap in runs]
    freedom = len(rest) - len(base)
    noise = Noise(math.sqrt(sum(np.square(rest)) / freedom) if freedom else math.nan, freedom)
    of_start = len(rest) / max(len(base), 1)
    means = {
        arm: np.array([np.mean(runs) for runs in gaps[arm].values()])
        for arm in sorted(gaps.keys() - reference)
    }
    effects = {arm: _effect(of_seeds, noise, of_start) for arm, of_seeds in means.items()}
    corrected = holm([effect.p for effect in effects.values()])
    effects = {
        arm: effect._replace(holm=p)
        for (arm, effect), p in zip(effects.items(), corrected, strict=True)
    }
    return Comparison(effects, noise, of_start)


def cost_of(gaps: list[float]) -> Cost:
    """The mean of each seed's difference, and its interval by Student's t."""
    error = np.std(gaps, ddof=1) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan
    return Cost(float(np.mean(gaps)), quantile(len(gaps) - 1) * float(error))


def _effect(differences: Float[np.ndarray, " seeds"], noise: Noise, baselines: float) -> Effect:
    """The mean difference over seeds, by Student's t; its interval covers the noise floor."""
    mean, seeds = float(np.mean(differences)), len(differences)
    if seeds < 2:
        return Effect(mean, math.nan, math.nan, math.nan, seeds)
    error = float(np.std(differences, ddof=1)) / math.sqrt(seeds)
    half, p = quantile(seeds - 1) * error, _p(mean, error, seeds - 1)
    floor = noise.error(seeds, baselines)
    if not math.isnan(floor):
        half = max(half, noise.band(seeds, baselines))
        p = max(p, _p(mean, floor, noise.floor_freedom))
    return Effect(mean, half, p, math.nan, seeds)


def seeds_for(half: float, effect: Effect) -> int:
    """How many seeds an interval of ± `half` needs, if they spread as those of `effect` do."""
    spread = effect.half * math.sqrt(effect.seeds) / quantile(effect.seeds - 1)
    seeds = 2
    while quantile(seeds - 1) * spread / math.sqrt(seeds) > half:
        seeds += 1
    return seeds


def gap(rows: list[Row], arm: str, baselines: Iterable[str]) -> Float[np.ndarray, " T"]:
    """The log of an arm's training loss above the baselines' at each step, mean over seeds.

    The gap of a baseline is to the other baselines of its start.
    """
    base: dict[Any, list[Any]] = defaultdict(list)
    for row in rows:
        if row["arm"] in set(baselines) - {arm}:
            base[start_of(row)].append(np.log(row["losses"]))
    own = [row for row in rows if row["arm"] == arm and start_of(row) in base]
    curves = [np.log(row["losses"]) - np.mean(base[start_of(row)], axis=0) for row in own]
    return np.mean(curves, axis=0) if curves else np.zeros(0)


def holm(ps: list[float]) -> list[float]:
    """The p-values of several statements, corrected so that they hold together (Holm 1979)."""
    known = [i for i, p in enumerate(ps) if not math.isnan(p)]
    corrected, largest = list(ps), 0.0
    for rank, i in enumerate(sorted(known, key=lambda i: ps[i])):
        largest = max(largest, min((len(known) - rank) * ps[i], 1.0))
        corrected[i] = largest
    return corrected


def quantile(freedom: int) -> float:
    """The quantile of Student's distribution at the ends of an interval."""
    from scipy import stats

    return float(stats.t.ppf((1 + LEVEL) / 2, freedom))


def _p(mean: float, error: float, freedom: int) -> float:
    from scipy import stats

    if error == 0:
        return 1.0 if mean == 0 else 0.0
    return float(2 * stats.t.sf(abs(mean / error), freedom))
