"""What quantization costs, and whether the cost depends on the training.

    cost     log(loss quantized) - log(loss in BF16)      of the same parameters
    excess   the cost of a network - the cost of a baseline of the same seed

A loss after further training is compared with the BF16 loss after as many steps in BF16, so that
the steps themselves are no part of the cost. Effects are relative: 0.001 is 0.1 % more loss.
"""

import math
from typing import NamedTuple

import numpy as np

from experiments.loss_study.conditions import baselines_of
from experiments.row_files import Row
from experiments.study.statistics import Cost, Effect, compare, cost_of


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
    """All that was measured of these runs, except for what it is compared with."""
    found = [What(recipe) for recipe in rows[0]["quantized"]]
    found += [What(name, how) for how, losses in rows[0]["further"].items() for name in losses]
    return [what for what in found if what != What("bf16", "bf16")]


def cost(row: Row, what: What) -> float:
    """The cost in one run."""
    if not what.further:
        return _log(row["quantized"][what.recipe]) - _log(row["held_out"]["bf16"])
    further = row["further"]
    return _log(further[what.further][what.recipe]) - _log(further["bf16"]["bf16"])


def costs(rows: list[Row]) -> dict[str, dict[What, Cost]]:
    """The cost of each thing that was measured, by the arm that was trained."""
    kinds = measured(rows)
    by_arm = {arm: [row for row in rows if row["arm"] == arm] for arm in {r["arm"] for r in rows}}
    return {
        arm: {what: cost_of([cost(row, what) for row in by_arm[arm]]) for what in kinds}
        for arm in sorted(by_arm)
    }


def excesses(rows: list[Row], what: What) -> dict[str, Effect]:
    """The excess of each arm over the baselines of its seeds; p-values are of all these arms."""
    return compare(rows, baselines_of(rows), lambda row: math.exp(cost(row, what))).effects


def _log(losses: list[float]) -> float:
    return math.log(np.mean(losses))
