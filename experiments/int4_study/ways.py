"""The ways in which a trained network is quantized.

    W4, W8      weights in 4 or 8 bits, with the scales of `coat.quantization`
    A8, A16     inputs of layers in E4M3 with a scale for each token, or in BF16
    KV8, KV4    keys and values as generation's cache stores them, in INT8 or INT4
    balanced    by `coat.quantization.balance`, before
    compensated with what `coat.quantization.calibrate` sees: errors of a weight's inputs cancel out
    FireQ       by `fireq`

BF16 rounds nothing: it is what the others are compared with.
"""

import dataclasses
from typing import Any, Literal

from coat_jax.ops.quantized import Activations, WeightFormat
from coat_jax.quantization.compensation import DAMPING
from experiments.int4_study.caches import Cache
from experiments.study.description import described as as_json

Weights = WeightFormat | Literal["compensated", "fireq"]
Fold = Literal["balanced", "fireq"]

CALIBRATION = 64  # rows of the training text
VERSION = 1  # of what the ways compute


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to quantize; the default quantizes nothing.

    Attributes:
        weights: how they are rounded; None leaves them in BF16.
        activations: how inputs of layers are rounded; those of "compensated" and "fireq" always
            have a scale for each token.
        cache: how keys and values are rounded, or None.
        fold: what is done to the network before, or None.
    """

    weights: Weights | None = None
    activations: Activations = "dynamic"
    cache: Cache | None = None
    fold: Fold | None = None


REFERENCE = "BF16"
WAYS = {
    REFERENCE: Way(),
    "W8A8 INT8": Way("int8"),
    "W8A8 FP8": Way("fp8"),
    "W4A16": Way("int4", activations="none"),
    "W4A8": Way("int4"),
    "W4A8 compensated": Way("compensated"),
    "W4A8 KV8": Way("int4", cache="int8"),
    "W4A8 KV4": Way("int4", cache="int4"),
    "W4A8 KV4 balanced": Way("int4", cache="int4", fold="balanced"),
    "FireQ W4A8": Way("fireq"),
    "FireQ W4A8 KV4": Way("fireq", cache="fireq", fold="fireq"),
}
# Each with the way of FireQ that rounds the same arrays to as many bits.
RIVALS = {
    "W4A8": "FireQ W4A8",
    "W4A8 compensated": "FireQ W4A8",
    "W4A8 KV4": "FireQ W4A8 KV4",
    "W4A8 KV4 balanced": "FireQ W4A8 KV4",
}


def described() -> dict[str, Any]:
    """The ways as JSON."""
    return {
        "ways": as_json(WAYS, types=False),
        "calibration": CALIBRATION,
        "damping": DAMPING,
        "version": VERSION,
    }
