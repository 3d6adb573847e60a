"""What quantization costs, and whether the cost depends on the training.

    cost     log(loss quantized) - log(loss in BF16)      of the same parameters
    excess   the cost of a network - the cost of a baseline of the same seed

Means over seeds have Student's intervals, as in the loss study; p-values are corrected for all that
stand in a table. A loss after further training is compared with the BF16 loss after as many steps
in BF16, so that the steps themselves are no part of the cost.

Effects are relative: 0.001 is 0.1 % more loss.
"""

import math
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np

from experiments.loss_study.results import baselines_of
from experiments.loss_study.statistics import Comparison, Effect, compare
from experiments.row_files import Row

REFERENCE = ""  # the arm that others are compared with


class What(NamedTuple):
    """Something that was measured of every run.

    Attributes:
        recipe: of quantization; "bf16" is none.
        further: the precision of further training; empty without it.
    """

    recipe: str
    further: str = ""

    def __str__(self) -> str:
        return f"{self.recipe}, after steps in {self.further}" if self.further else self.recipe


def measured(rows: list[Row]) -> list[What]:
    """All that was measured of these runs, but for what it is compared with."""
    found = [What(recipe) for recipe in rows[0]["quantized"]]
    found += [What(name, how) for how, losses in rows[0]["further"].items() for name in losses]
    return [what for what in found if what != What("bf16", "bf16")]


def cost(row: Row, what: What) -> float:
    """The cost in one run."""
    if not what.further:
        return _log(row["quantized"][what.recipe]) - _log(row["held_out"]["bf16"])
    further = row["further"]
    return _log(further[what.further][what.recipe]) - _log(further["bf16"]["bf16"])


def costs(rows: list[Row]) -> dict[str, dict[What, Effect]]:
    """The cost of each thing that was measured, by the arm that was trained."""
    kinds = measured(rows)
    found = {}
    for arm in sorted({row["arm"] for row in rows}):
        of_arm = [row for row in rows if row["arm"] == arm]
        effects = [(what, row["seed"], cost(row, what)) for row in of_arm for what in kinds]
        found[arm] = _means(effects).effects
    return found


def excesses(rows: list[Row]) -> dict[str, dict[What, Effect]]:
    """The excess of each arm that is no baseline, over the seeds that have one."""
    kinds, baselines = measured(rows), baselines_of(rows)
    usual: dict[Any, list[float]] = defaultdict(list)
    for row in rows:
        for what in kinds if row["arm"] in baselines else ():
            usual[row["seed"], what].append(cost(row, what))
    effects = [
        ((row["arm"], what), row["seed"], cost(row, what) - float(np.mean(base)))
        for row in rows
        for what in kinds
        if row["arm"] not in baselines and (base := usual.get((row["seed"], what)))
    ]
    found: dict[str, dict[What, Effect]] = defaultdict(dict)
    for (arm, what), effect in _means(effects).effects.items() if effects else ():
        found[arm][what] = effect
    return found


def _means(effects: list[tuple[Any, int, float]]) -> Comparison:
    """Effects of something in a seed, compared with nothing."""
    rows = [{"arm": name, "seed": seed, "loss": math.exp(value)} for name, seed, value in effects]
    rows += [{"arm": REFERENCE, "seed": seed, "loss": 1.0} for seed in {e[1] for e in effects}]
    return compare(rows, {REFERENCE}, lambda row: row["loss"])


def _log(losses: list[float]) -> float:
    return math.log(np.mean(losses))
