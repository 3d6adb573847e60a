"""Rounding to FP8: the counterpart of `coat_jax.formats`.

Casts to FP8 round to nearest and saturate on hardware, and need no help. Triton's interpreter does
neither well: where FAST is off, values are rounded before they are cast.
"""

import triton
import triton.language as tl

from coat_jax.kernels.triton.arithmetic import (
    copysign,
    floor_positive,
    reciprocal,
    reciprocal_of_integer,
)


@triton.jit
def round_to_fp8(y, F8: tl.constexpr, FAST: tl.constexpr):
    """The FP8 value nearest to y, for the cast that follows; left to the cast where FAST."""
    if FAST:
        return y
    return copysign(representable(tl.abs(y), F8, FAST), y)


@triton.jit
def through_fp8(y, dtype: tl.constexpr, FAST: tl.constexpr):
    """y after a round trip through FP8, if `round_to_fp8` has not done it."""
    if FAST:
        return y.to(dtype).to(tl.float32)
    return y


@triton.jit
def representable(image, F8: tl.constexpr, FAST: tl.constexpr):
    """The nearest FP8 value of image, zero for a negative one, for the cast that follows.

    The hardware's cast rounds and saturates by itself; what dithering made negative is less than
    half the smallest code and becomes zero. The interpreter's loses the carry from the mantissa
    into the exponent: 1.97 would become 1.
    """
    if FAST:
        return image
    image = tl.where(image < 0, 0.0, image)
    unit, per_unit = unit_in_last_place(image, F8)
    image = ((image * per_unit + 8388608.0) - 8388608.0) * unit
    return tl.where(image > F8.max, F8.max, image)


@triton.jit
def round_stochastically(image, noise, k16, F8: tl.constexpr, FAST: tl.constexpr):
    """`formats.stochastic_cast` of image >= 0. `noise` is 128 + 16 bits / 2^16.

    Rounds up where noise and probability carry into the next integer, and cuts the rest off
    (which leaves NaN what it is).
    """
    curvature = 1.0 - 16.0 * reciprocal(k16, FAST)
    unit, per_unit = unit_in_last_place(image, F8)
    scaled = image * per_unit
    below = floor_positive(scaled, FAST)
    fraction = scaled - below
    bend = (fraction - fraction * fraction) * reciprocal_of_integer(2.0 * below + 1.0, FAST)
    carried = curvature[:, None] * bend + scaled + noise
    whole = (carried.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return (whole - 128.0) * unit


@triton.jit
def unit_in_last_place(image, F8: tl.constexpr):
    """The distance of FP8 values around image >= 0, and its reciprocal."""
    exponent = image.to(tl.uint32, bitcast=True) & 0x7F800000
    exponent = tl.maximum(exponent, (127 + F8.min_exponent) << 23)
    unit = (exponent - (F8.mantissa_bits << 23)).to(tl.float32, bitcast=True)
    return unit, (((254 + F8.mantissa_bits) << 23) - exponent).to(tl.float32, bitcast=True)
