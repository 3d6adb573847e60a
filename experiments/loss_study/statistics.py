"""From runs to statements: how much more loss each arm has than the baselines, and how surely.

Within a seed all arms share initial parameters and batches, so that what is compared is the log of
the loss, arm against baseline of the same seed. With y the log of a run's loss,

    y = seed + effect of the arm + noise        (a randomized block design; seeds are the blocks)

is fitted by least squares over all runs. Baselines are several runs of each seed that differ by
rounding only; their effect is 0 by definition. The noise is what no seed and no arm explains: it
has one variance, estimated from all arms together, which gives intervals that three seeds alone
could not. Beside it stand the interval from the arm's own seeds only, the noise floor from the
baselines alone, and, within a run, the standard error over blocks of steps: the last is smaller
than the difference to another run of the same arm, and says only how well two runs differ.

Effects are relative: 0.001 is 0.1 % more loss.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

Row = dict[str, Any]
LEVEL = 0.95
BLOCKS = 8
FINAL = 0.1  # the share of a run whose mean is its final loss


class Effect(NamedTuple):
    """What an arm costs in loss, relative to the baselines.

    Attributes:
        mean: the estimate.
        half: half the width of its interval, from the noise of all arms; NaN without any.
        own: likewise from the differences of this arm's seeds alone.
        within: the standard error over blocks of steps; NaN for held-out losses.
        p: of no effect at all, from the noise of all arms.
        holm: the same, corrected for the number of arms.
        seeds: how many.
    """

    mean: float
    half: float
    own: float
    within: float
    p: float
    holm: float
    seeds: int


class Noise(NamedTuple):
    """Differences that mean nothing.

    Attributes:
        run: the standard deviation of a run, from all arms.
        freedom: its degrees of freedom.
        floor: the standard deviation of a baseline within its seed.
        floor_freedom: its degrees of freedom.
    """

    run: float
    freedom: int
    floor: float
    floor_freedom: int

    def band(self, seeds: int, baselines: float) -> float:
        """The largest mean difference over `seeds` that rounding alone explains."""
        if self.floor_freedom == 0 or seeds == 0:
            return math.nan
        spread = self.floor * math.sqrt(1 / seeds + 1 / (seeds * baselines))
        return _quantile(self.floor_freedom) * spread


class Comparison(NamedTuple):
    """All arms under equal conditions."""

    effects: dict[str, Effect]
    noise: Noise
    baselines: float  # for each seed, on average


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
    """The effect of each arm, from the seeds that have a baseline.

    Args:
        rows: runs under equal conditions; two of one arm and seed are two runs.
        baselines: arms that differ by rounding only.
        loss: of a run.
    """
    reference = set(baselines)
    seeds = sorted({row["seed"] for row in rows if row["arm"] in reference})
    used = [row for row in rows if row["seed"] in seeds]
    arms = sorted({row["arm"] for row in used} - reference)
    values = np.array([math.log(loss(row)) for row in used])
    places = [seeds.index(row["seed"]) for row in used]
    design = np.zeros((len(used), len(seeds) + len(arms)))
    for i, row in enumerate(used):
        design[i, places[i]] = 1
        if row["arm"] in arms:
            design[i, len(seeds) + arms.index(row["arm"])] = 1
    inverse = np.linalg.pinv(design.T @ design)
    fitted = inverse @ design.T @ values
    freedom = len(used) - len(seeds) - len(arms)
    rest = values - design @ fitted
    run = math.sqrt(float(rest @ rest) / freedom) if freedom > 0 else math.nan
    base = {s: values[[r["seed"] == s and r["arm"] in reference for r in used]] for s in seeds}
    floor_freedom = sum(len(b) - 1 for b in base.values())
    squares = sum(float(np.sum((b - b.mean()) ** 2)) for b in base.values())
    floor = math.sqrt(squares / floor_freedom) if floor_freedom > 0 else math.nan
    effects = {}
    for j, arm in enumerate(arms):
        column = len(seeds) + j
        mean, error = fitted[column], run * math.sqrt(inverse[column, column])
        differences = np.array([
            values[i] - base[row["seed"]].mean()
            for i, row in enumerate(used)
            if row["arm"] == arm
        ])  # fmt: skip
        effects[arm] = Effect(
            mean=float(mean),
            half=_quantile(freedom) * error if freedom > 0 else math.nan,
            own=_own(differences),
            within=_within(used, arm, reference) if loss is final else math.nan,
            p=_p(mean / error, freedom) if freedom > 0 and error > 0 else math.nan,
            holm=math.nan,
            seeds=len({row["seed"] for row in used if row["arm"] == arm}),
        )
    corrected = holm([effect.p for effect in effects.values()])
    effects = {
        arm: effect._replace(holm=p)
        for (arm, effect), p in zip(effects.items(), corrected, strict=True)
    }
    count = sum(map(len, base.values())) / max(len(seeds), 1)
    return Comparison(effects, Noise(run, max(freedom, 0), floor, floor_freedom), count)


def gap(rows: list[Row], arm: str, baselines: Iterable[str]) -> Float[np.ndarray, " T"]:
    """The log of an arm's training loss above the baselines' at each step, mean over seeds.

    For a baseline it is that against the other baselines of its seed.
    """
    reference = set(baselines) - {arm}
    curves = []
    for row in rows:
        if row["arm"] == arm:
            base = _curves(rows, reference, row["seed"])
            if base:
                curves.append(np.log(row["losses"]) - np.mean(base, axis=0))
    return np.mean(curves, axis=0) if curves else np.zeros(0)


def block_error(differences: Float[np.ndarray, " T"]) -> float:
    """The standard error of the mean of numbers that resemble their neighbours."""
    if len(differences) < 2 * BLOCKS:
        return math.nan
    means = [float(np.mean(block)) for block in np.array_split(differences, BLOCKS)]
    return float(np.std(means, ddof=1)) / math.sqrt(BLOCKS)


def holm(ps: list[float]) -> list[float]:
    """The p-values of several statements, corrected so that they hold together (Holm 1979)."""
    known = [i for i, p in enumerate(ps) if not math.isnan(p)]
    corrected, largest = list(ps), 0.0
    for rank, i in enumerate(sorted(known, key=lambda i: ps[i])):
        largest = max(largest, min((len(known) - rank) * ps[i], 1.0))
        corrected[i] = largest
    return corrected


def _curves(rows: list[Row], arms: set[str], seed: int) -> list[Float[np.ndarray, " T"]]:
    return [np.log(r["losses"]) for r in rows if r["arm"] in arms and r["seed"] == seed]


def _within(rows: list[Row], arm: str, reference: set[str]) -> float:
    """The block error of the final loss, of a mean over the arm's runs."""
    squares = []
    for row in rows:
        if row["arm"] == arm:
            base = np.mean(_curves(rows, reference, row["seed"]), axis=0)
            last = max(round(FINAL * len(base)), 1)
            squares.append(block_error((np.log(row["losses"]) - base)[-last:]) ** 2)
    return math.sqrt(sum(squares)) / len(squares)


def _own(differences: Float[np.ndarray, " N"]) -> float:
    count = len(differences)
    if count < 2:
        return math.nan
    return _quantile(count - 1) * float(np.std(differences, ddof=1)) / math.sqrt(count)


def _quantile(freedom: int) -> float:
    from scipy import stats

    return float(stats.t.ppf((1 + LEVEL) / 2, freedom))


def _p(t: float, freedom: int) -> float:
    from scipy import stats

    return float(2 * stats.t.sf(abs(t), freedom))
