"""How a network that was trained in BF16 is tuned.

Parameters are in BF16 and rounded stochastically in all ways. What differs is the precision of the
products, what layers save, and how moments are stored; or which operands of products in BF16 are
rounded to FP8.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import coat_jax as coat
from coat_jax.storage import Storage
from experiments.loss_study.arm import Arm
from experiments.study.description import described

BASE = Arm(params="bf16_stochastic", baseline=True)
MOMENTS = replace(BASE, moments=Storage(), baseline=False)
ROUNDED = {
    "inputs_rounded": ("inputs",),
    "weights_rounded": ("weights",),
    "backward_rounded": ("recomputed", "gradients"),
}
WAYS: dict[str, Arm] = {
    "bf16": BASE,
    "bf16_microbatches": replace(BASE, microbatches=2),
    "moments": MOMENTS,
    "products": replace(BASE, precision=coat.FP8_LINEAR, baseline=False),
    "coat": replace(MOMENTS, precision=coat.COAT),
    "coat_int8": replace(MOMENTS, precision=coat.COAT_INT8),
    "coat_bf16_forward": replace(MOMENTS, precision=coat.COAT_BF16_FORWARD),
    "coat_lean": replace(MOMENTS, precision=coat.COAT_LEAN),
    "coat_paper": replace(MOMENTS, precision=coat.COAT_PAPER),
    **{name: replace(BASE, rounded=of, baseline=False) for name, of in ROUNDED.items()},
}
USUAL = ("bf16", "bf16_microbatches", "coat", "coat_int8")
STEPS = 300
RATE = 0.1  # of the highest learning rate of the training before


def definitions(names: Iterable[str]) -> dict[str, Any]:
    """Some ways as JSON, with what all have in common."""
    ways = {name: described(WAYS[name]) for name in names}
    return {"ways": ways, "steps": STEPS, "rate": RATE}
