"""How a network that was trained in BF16 is tuned.

Parameters are in BF16 and rounded stochastically in all ways. What differs is the precision of the
products, what layers save, and how moments are stored; or, for `--parts`, which operands of the
products are rounded to FP8; or, for `--int8`, whether the forward products are in INT8.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import coat_jax as coat
from coat_jax.storage import Storage
from experiments.loss_study.arm import Arm, described

BASE = Arm(params="bf16_stochastic", baseline=True)
MOMENTS = replace(BASE, moments=Storage(), baseline=False)
WAYS: dict[str, Arm] = {
    "bf16": BASE,
    "bf16_microbatches": replace(BASE, microbatches=2),
    "moments": MOMENTS,
    "products": replace(BASE, precision=coat.FP8_LINEAR, baseline=False),
    "coat": replace(MOMENTS, precision=coat.COAT),
    "coat_lean": replace(MOMENTS, precision=coat.COAT_LEAN),
    "coat_paper": replace(MOMENTS, precision=coat.COAT_PAPER),
}
PARTS: dict[str, Arm] = {
    "bf16": BASE,
    "inputs_rounded": replace(BASE, rounded=("inputs",), baseline=False),
    "weights_rounded": replace(BASE, rounded=("weights",), baseline=False),
    "backward_rounded": replace(BASE, rounded=("recomputed", "gradients"), baseline=False),
}
INT8: dict[str, Arm] = {
    **{name: WAYS[name] for name in ("bf16", "bf16_microbatches", "coat")},
    "coat_int8": replace(MOMENTS, precision=coat.COAT_INT8),
}
STEPS = 300
RATE = 0.1  # of the highest learning rate of the training before


def definitions(ways: Mapping[str, Arm]) -> dict[str, Any]:
    """Each of these ways as JSON, with what all have in common."""
    described_ways = {name: described(arm) for name, arm in ways.items()}
    return {"ways": described_ways, "steps": STEPS, "rate": RATE}
