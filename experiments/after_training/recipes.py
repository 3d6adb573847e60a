"""How trained networks are quantized, and how they are trained a little further before that.

int8 | fp8       the format of codes, E4M3 if FP8
max, mse, ...    the fit of ranges: of weights per channel, and of static activations
none             activations stay in BF16
static           one scale for each layer's input, from some rows of the training text
dynamic          one for each token, from its largest element
"""

import dataclasses
from typing import Any, get_args

from coat_jax import BF16, E4M3, Precision
from coat_jax.numerics.quantizer import FITS
from coat_jax.ops.quantized import Activations
from coat_jax.quantization import Recipe
from experiments.study.description import differences

FORMATS = ("int8", "fp8")
RECIPES = {
    f"{form} {fit} {activations}": Recipe(
        format=form, fit=fit, activations=activations, activation_fit=fit
    )
    for form in FORMATS
    for fit in FITS
    for activations in get_args(Activations)
}
# After further training not all are measured again.
AFTER_FURTHER = [
    f"{form} mse {activations}" for form in FORMATS for activations in ("static", "dynamic")
]

CALIBRATION = 64  # rows of the training text
FURTHER_STEPS = 40
FURTHER_RATE = 0.1  # of the highest learning rate of the run


def _anticipating(forward: Any) -> Precision:
    """Products round inputs and weights to this format, with gradients as if they did not.

    Each input and each weight has one power of two as its scale, so the rounding is coarser than
    that of the recipes, which have a scale for each channel of a weight.
    """
    return Precision(forward=forward, backward="E8M7", block=None)


# Precisions of further training: BF16 anticipates nothing, and shows what the steps do.
FURTHER = {"bf16": BF16, "int8": _anticipating("E0M7"), "fp8": _anticipating(E4M3)}


def described() -> dict[str, Any]:
    """Recipes and further training as JSON."""
    return {
        "recipes": {name: dataclasses.asdict(recipe) for name, recipe in RECIPES.items()},
        "after further training": AFTER_FURTHER,
        "calibration": CALIBRATION,
        "further": [
            FURTHER_STEPS,
            FURTHER_RATE,
            {name: differences(p) for name, p in FURTHER.items()},
        ],
    }
