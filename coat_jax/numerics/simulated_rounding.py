"""Rounding to simulated formats: which two values a number lies between, and which it becomes.

nearest       to the nearer one; ties to the even one
stochastic    to either, with probabilities that make the result right on average
truncate      to the one towards zero
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

RoundingMode = Literal["nearest", "stochastic", "truncate"]
ROUNDING_MODES: tuple[RoundingMode, ...] = ("nearest", "stochastic", "truncate")
LIFT = 64  # binades by which numbers are moved towards 1 while they are rounded


class Place(NamedTuple):
    """Where magnitudes lie between the values of a format: (whole + fraction) * unit * back.

    Rounding replaces the fraction with 0 or 1.

    Attributes:
        whole: the value below, in units.
        fraction: of the distance to the next value.
        unit: that distance, moved towards 1 by `LIFT` binades.
        back: the factor that moves it back.
    """

    whole: Float[Array, "..."]
    fraction: Float[Array, "..."]
    unit: Float[Array, "..."]
    back: Float[Array, "..."]


def require_mode(mode: RoundingMode, noise: Array | None) -> None:
    """Raises if noise is missing for a mode that needs it, or given for one that does not."""
    if mode not in ROUNDING_MODES:
        raise ValueError(f"Rounding {mode!r} must be one of {', '.join(ROUNDING_MODES)}.")
    if (mode == "stochastic") != (noise is not None):
        raise ValueError(
            f"Rounding {mode!r} came {'without' if noise is None else 'with'} noise: "
            '"stochastic" needs noise, and no other mode takes it.'
        )


def rounds_up(
    whole: Float[Array, "..."],
    fraction: Float[Array, "..."],
    mode: RoundingMode,
    noise: Float[Array, "..."] | None,
) -> Bool[Array, "..."]:
    """Whether whole + fraction is rounded to whole + 1."""
    if mode == "truncate":
        return jnp.zeros(fraction.shape, bool)
    if noise is not None:
        return noise < fraction
    return (fraction > 0.5) | ((fraction == 0.5) & (whole % 2 == 1))


def place_of(
    x: Float[Array, "..."], *, mantissa_bits: int, min_exponent: int, tiny: float, largest: float
) -> Place:
    """The values of a format that the magnitudes of `x` lie between.

    Args:
        x: the numbers, in FP32.
        mantissa_bits: of the format.
        min_exponent: of its smallest normal value.
        tiny: its smallest positive value.
        largest: its largest value; larger magnitudes count as this one.
    """
    magnitude = jnp.minimum(jnp.abs(x), largest)
    # Moved towards 1, so that units in the last place and their reciprocals are normal numbers.
    small = magnitude < 1
    moved = magnitude * jnp.where(small, 2.0**LIFT, 2.0**-LIFT)
    by = jnp.where(small, LIFT, -LIFT)
    exponent = (jax.lax.bitcast_convert_type(moved, jnp.int32) >> 23) - 127
    exponent = jnp.maximum(exponent, min_exponent + by)
    scaled = moved * _power(mantissa_bits - exponent)
    unit = _power(exponent - mantissa_bits)
    # Below the smallest value, that value is the unit. (A subnormal one is the unit anyway.)
    least = jnp.where(small, tiny * 2.0**LIFT, tiny * 2.0**-LIFT).astype(jnp.float32)
    below_least = moved < least
    scaled = jnp.where(below_least, moved / least, scaled)
    unit = jnp.where(below_least, least, unit)
    whole = jnp.floor(scaled)
    return Place(whole, scaled - whole, unit, jnp.where(small, 2.0**-LIFT, 2.0**LIFT))


def _power(exponent: Array) -> Float[Array, "..."]:
    """2^exponent, a normal number of FP32."""
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
