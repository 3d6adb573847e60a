"""What a run records at its steps, and how rows store it.

Curves are the base64 of zlib of float16 [3, seeds, points], so that thousands of them fit a file of
a megabyte: the error is at most 0.05 %, and numbers above 65504 become infinite.
"""

import base64
import zlib
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Float


class Signals(NamedTuple):
    """What a step reports, from before its update: numbers, or [runs, steps] for a whole grid."""

    loss: Float[Array, "..."]
    gradient_norm: Float[Array, "..."]
    sharpness: Float[Array, "..."]


def packed(curves: Float[np.ndarray, "3 runs points"]) -> dict[str, Any]:
    """Curves as JSON."""
    with np.errstate(over="ignore"):
        halves = curves.astype("<f2")
    return {
        "shape": list(halves.shape),
        "float16": base64.b64encode(zlib.compress(halves.tobytes(), 9)).decode(),
    }


def unpacked(stored: dict[str, Any]) -> Float[np.ndarray, "3 runs points"]:
    """Curves from JSON, in FP32."""
    raw = zlib.decompress(base64.b64decode(stored["float16"]))
    return np.frombuffer(raw, "<f2").reshape(stored["shape"]).astype(np.float32)
