"""The two 8-bit floating-point formats, and how a number becomes one.

    E4M3  4 exponent bits, 3 mantissa bits, largest 448,   smallest 2^-9
    E5M2  5 exponent bits, 2 mantissa bits, largest 57344, smallest 2^-16

`saturating_cast` rounds to nearest (ties to even). `stochastic_cast` and `round_at_random` round up
or down with probabilities that make the result right on average; `dithered_cast` does so for
the smallest codes only. All clip first: a plain cast turns values that are too large into NaN
(E4M3) or infinity (E5M2). NaN stays NaN.

Arithmetic on FP8 arrays is left out on purpose: JAX would run it in 8 bits. Cast first.

Where these functions take a dtype they also take a `Minifloat`, for experiments with formats that
no hardware has. Its codes are simulated: values in BF16 or FP32.
"""

import contextlib
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, UInt32

from coat_jax.numerics.minifloat import Minifloat, minifloat

E4M3 = jnp.float8_e4m3fn
E5M2 = jnp.float8_e5m2
DTYPES: dict[str, Any] = {"E4M3": E4M3, "E5M2": E5M2}
SMALLEST_NORMAL = 2.0**-126  # of FP32


class Format(NamedTuple):
    """What arithmetic needs to know of a format."""

    name: str
    max: float  # the largest finite value
    tiny: float  # the smallest positive value, a subnormal
    min_exponent: int  # of the smallest normal value
    mantissa_bits: int
    top_exponent: int  # of the top binade: E4M3 and E5M2 end at 1.75 * 2^top_exponent

    @property
    def log2_range(self) -> float:
        """log2 of the largest over the smallest positive value."""
        return math.log2(self.max / self.tiny)


_FORMATS = {
    jnp.dtype(E4M3): Format("E4M3", 448.0, 2.0**-9, -6, 3, 8),
    jnp.dtype(E5M2): Format("E5M2", 57344.0, 2.0**-16, -14, 2, 15),
}


def format_of(dtype: DTypeLike) -> Format:
    """Returns the limits of an FP8 dtype or a `Minifloat`; raises for any other dtype."""
    if isinstance(dtype, Minifloat):
        tiny = max(dtype.tiny, SMALLEST_NORMAL)
        # If E = 0, the upper half of the integers counts as normal: the first bit of m leads.
        leading = dtype.exponent_bits == 0
        min_exponent, mantissa_bits = dtype.min_exponent - leading, dtype.mantissa_bits - leading
        top = math.frexp(dtype.full_scale)[1] - 1
        return Format(dtype.name, dtype.full_scale, tiny, min_exponent, mantissa_bits, top)
    try:
        return _FORMATS[jnp.dtype(dtype)]
    except (KeyError, TypeError):
        raise ValueError(
            f"{dtype!r} is not an FP8 format of coat_jax. Use coat.formats.E4M3 (more precision) "
            "or coat.formats.E5M2 (more range)."
        ) from None


def named_format(value: Any, *others: Any) -> Any:
    """The format that a dtype, a `Minifloat` or a name such as "E3M4" stands for; None if none.

    It is an FP8 dtype, one of the dtypes `others`, or a `Minifloat` that has no dtype.
    """
    if isinstance(value, str):
        with contextlib.suppress(ValueError):  # it may be the name of a dtype
            value = minifloat(value)
    if isinstance(value, Minifloat):
        return DTYPES.get(value.name, value)
    for known in (*others, E4M3, E5M2):
        with contextlib.suppress(TypeError):  # not a dtype
            if value is not None and jnp.dtype(value) == known:
                return known
    return None


def codes_dtype(dtype: DTypeLike) -> DTypeLike:
    """The dtype of an array of codes: the FP8 dtype, or the one that simulates a `Minifloat`."""
    return dtype.container if isinstance(dtype, Minifloat) else dtype


def saturating_cast(x: Float[ArrayLike, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
    """Rounds `x` to the nearest value of `dtype`; values beyond its range saturate."""
    limit = format_of(dtype).max
    if isinstance(dtype, Minifloat):
        return nearest(jnp.asarray(x), dtype).astype(dtype.container)
    return jnp.clip(x, -limit, limit).astype(dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def nearest(x: Float[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
    """`saturating_cast` without the cast: FP32 values that are codes of `dtype`.

    Casting them to `dtype` changes nothing. On GPUs, XLA drops a cast to FP8 and back within a
    program, and with it the rounding, so values must be rounded before. As with a cast, the
    derivative is 1.
    """
    fmt = format_of(dtype)
    x = jnp.clip(x.astype(jnp.float32), -fmt.max, fmt.max)
    if isinstance(dtype, Minifloat):
        return dtype.round(x)
    unit = _unit_in_last_place(x, fmt)
    # The reciprocal of a power of two, from its exponent: a division would be slow, and XLA may
    # turn x * (1 / unit) back into one.
    inverse = jax.lax.bitcast_convert_type(
        np.uint32(254 << 23) - jax.lax.bitcast_convert_type(unit, jnp.uint32), jnp.float32
    )
    return jnp.round(x * inverse) * unit


@nearest.defjvp
def _nearest_jvp(dtype: DTypeLike, primals: tuple[Array], tangents: tuple[Array]) -> Any:
    (x,), (tangent,) = primals, tangents
    return nearest(x, dtype), tangent.astype(jnp.float32)


def stochastic_cast(
    x: Float[ArrayLike, "..."],
    dtype: DTypeLike,
    noise: Float[Array, "..."],
    *,
    curvature: Float[ArrayLike, "..."] = 0.0,
) -> Float[Array, "..."]:
    """Rounds `x` up or down at random, so that the mean of many results is `x`.

    Args:
        x: what to round, computed with in FP32.
        dtype: the FP8 format.
        noise: uniform in [0, 1), of the shape of `x`.
        curvature: 1 - a, where x^a is what should be right on average instead of x.
            Between neighbours n and n + 1 (in units of the last place) the right
            probability of rounding up is then

                p(f) = ((1 + f/n)^a - 1) / ((1 + 1/n)^a - 1),    f = x - n

            approximated here by  f + (1 - a) / (2 n + 1) f (1 - f), exact for a = 2. The relative
            error of the mean of x^a is then up to 4e-5 for n >= 4 and 1.4e-3 for n = 1, the
            smallest subnormal; it changes sign along f. Between zero and n = 1 the right
            probability is f^a, and the approximation is exact for a = 1 and a = 2.
    """
    fmt = format_of(dtype)
    x = jnp.clip(jnp.asarray(x, jnp.float32), -fmt.max, fmt.max)
    if isinstance(dtype, Minifloat):
        below, fraction, moved, back = dtype.place(x)
        unit = moved * back
    else:
        unit = _unit_in_last_place(x, fmt)
        scaled = jnp.abs(x) / unit
        below = jnp.floor(scaled)
        fraction = scaled - below
    bend = curvature / (2.0 * below + 1.0)
    probability = fraction + bend * fraction * (1.0 - fraction)
    rounded = (below + (noise < probability).astype(jnp.float32)) * unit
    return saturating_cast(jnp.copysign(rounded, x), dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def round_at_random(
    x: Float[Array, "..."], dtype: DTypeLike, bits: UInt32[Array, "..."]
) -> Float[Array, "..."]:
    """Rounds `x` up or down, right on average, to FP32 values that are codes of `dtype`.

    Adds random bits below the last place, and drops them: a carry rounds up. In FP8, values below
    the smallest normal one are then rounded again, to nearest. As with a cast, the derivative is 1.

    Args:
        x: what to round, not above the largest value of `dtype`.
        dtype: the format.
        bits: 32 random bits for each element.
    """
    if isinstance(dtype, Minifloat):
        # The complement makes "noise < p" the same as a carry of p + bits.
        noise = (~bits >> 8).astype(jnp.float32) * np.float32(2.0**-24)
        return stochastic_cast(x, dtype, noise).astype(jnp.float32)
    dropped = np.uint32(23 - format_of(dtype).mantissa_bits)
    carried = jax.lax.bitcast_convert_type(x, jnp.uint32) + (bits >> (np.uint32(32) - dropped))
    values = jax.lax.bitcast_convert_type(carried >> dropped << dropped, jnp.float32)
    # A carry would turn the NaN that GPUs compute, all of whose bits are set, into a zero.
    return nearest(jnp.where(jnp.isnan(x), x, values), dtype)


@round_at_random.defjvp
def _round_at_random_jvp(dtype: DTypeLike, primals: tuple[Array, Array], tangents: Any) -> Any:
    x, bits = primals
    return round_at_random(x, dtype, bits), tangents[0].astype(jnp.float32)


def dithered_cast(
    x: Float[ArrayLike, "..."], dtype: DTypeLike, noise: Float[Array, "..."]
) -> Float[Array, "..."]:
    """Rounds `x` to nearest, after adding noise as wide as the distance of the smallest codes.

    Where codes lie no further apart than that (subnormal ones and the first normal binade), this is
    stochastic rounding. The larger the code, the less the noise matters. Zero stays zero.

    Args:
        x: what to round, computed with in FP32.
        dtype: the FP8 format.
        noise: uniform in [0, 1), of the shape of `x`.
    """
    x = jnp.asarray(x, jnp.float32)
    magnitude = jnp.maximum(jnp.abs(x) + (noise - 0.5) * format_of(dtype).tiny, 0.0)
    return saturating_cast(jnp.copysign(magnitude, x), dtype)


def _unit_in_last_place(x: Float[Array, "..."], fmt: Format) -> Float[Array, "..."]:
    """The distance of neighbouring FP8 values around `x`: a power of two."""
    exponent_field = jax.lax.bitcast_convert_type(x, jnp.uint32) & np.uint32(0x7F80_0000)
    smallest = np.uint32((127 + fmt.min_exponent) << 23)
    exponent_field = jnp.maximum(exponent_field, smallest)
    return jax.lax.bitcast_convert_type(
        exponent_field - np.uint32(fmt.mantissa_bits << 23), jnp.float32
    )
