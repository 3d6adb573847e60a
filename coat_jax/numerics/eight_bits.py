"""Codes of 8 bits that GPUs multiply at inference, with a scale that need not be a power of two.

    format    dtype            codes            x ~ codes * scale
    "int8"    int8             -128 .. 127      even steps
    "fp8"     float8_e4m3fn    -448 .. 448      steps that grow with the number

`numerics.quantizer` simulates any format and finds the ranges of its scales; these are the codes
themselves. Ties go to even. Values that are too large saturate. A scale maps the largest magnitude
to 127 or 448.
"""

from typing import Any, Literal

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax.numerics.formats import E4M3, nearest
from coat_jax.numerics.quantizer import Fit, Quantizer

EightBits = Literal["int8", "fp8"]

DTYPES: dict[EightBits, Any] = {"int8": jnp.int8, "fp8": E4M3}
LARGEST: dict[EightBits, float] = {"int8": 127.0, "fp8": 448.0}
SMALLEST_SCALE = 2.0**-126  # XLA flushes smaller numbers to 0, by which codes cannot be divided
SIMULATED: dict[EightBits, str] = {"int8": "INT8", "fp8": "E4M3"}  # as `numerics.quantizer` says


def format_of_codes(dtype: DTypeLike) -> EightBits:
    """The format whose codes have this dtype."""
    for name, own in DTYPES.items():
        if jnp.dtype(dtype) == jnp.dtype(own):
            return name
    raise ValueError(f"Codes of dtype {jnp.dtype(dtype).name} must be int8 or float8_e4m3fn.")


def encode(x: Float[Array, "..."], scale: Float[Array, "..."], name: EightBits) -> Array:
    """The codes of `x`, given scales that broadcast with it. In INT8, NaN becomes 0."""
    scaled = x.astype(jnp.float32) / scale
    if name == "fp8":
        # XLA drops a cast to FP8 that another cast follows, so the values are rounded before it.
        return nearest(scaled, E4M3).astype(E4M3)
    whole = jnp.clip(jnp.round(scaled), -128, 127)
    return jnp.where(jnp.isnan(whole), 0, whole).astype(jnp.int8)


def rounded(
    x: Float[Array, "..."], scale: Float[Array, "..."], name: EightBits
) -> Float[Array, "..."]:
    """What the codes of `x` stand for, in FP32."""
    if name == "fp8":
        return nearest(x.astype(jnp.float32) / scale, E4M3) * scale
    return encode(x, scale, name).astype(jnp.float32) * scale


def scale_of(largest: Float[Array, "..."], name: EightBits) -> Float[Array, "..."]:
    """The scale with which numbers up to `largest` have codes; 1 where all are zero."""
    scale = jnp.maximum(largest / LARGEST[name], SMALLEST_SCALE)
    return jnp.where(largest == 0, 1.0, scale).astype(jnp.float32)


def channel_scales(
    weight: Float[Array, "K N"], name: EightBits, fit: Fit, percentile: float
) -> Float[Array, " N"]:
    """A scale for each output channel of a weight; NaN for one with a NaN or an infinity.

    Outside of `jit`, `Quantizer` may raise an error for it instead.
    """
    own: Any = SIMULATED[name]
    quantizer = Quantizer(own, over="channel", fit=fit, percentile=percentile)
    scale = scale_of(quantizer.limit_of(weight), name)
    # XLA's maximum on CPUs may lose a NaN.
    return jnp.where(jnp.all(jnp.isfinite(weight), axis=0), scale, jnp.nan)
