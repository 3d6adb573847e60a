"""Rounding to FP8: the counterpart of `coat_jax.numerics.formats`.

On hardware a cast to FP8 rounds to nearest and saturates. In Triton's interpreter it does neither
reliably, so where FAST is off, values are rounded before they are cast.
"""

import triton
import triton.language as tl

from coat_jax.kernels.triton.arithmetic import (
    FAST,
    copysign,
    floor_positive,
    reciprocal,
    reciprocal_of_integer,
)


@triton.jit
def round_to_fp8(y, F8: tl.constexpr):
    """The FP8 value nearest to y, in FP32; with FAST y itself, which the next cast rounds."""
    if FAST:
        return y
    return copysign(representable(tl.abs(y), F8), y)


@triton.jit
def round_to_bf16(y):
    """y in BF16. The interpreter's cast drops the lower bits."""
    if FAST:
        return y.to(tl.bfloat16)
    bits = y.to(tl.int32, bitcast=True)
    bits += 0x7FFF + ((bits >> 16) & 1)
    return (bits >> 16 << 16).to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def round_to(y, dtype: tl.constexpr):
    """y in BF16, FP16 or FP32."""
    return round_to_bf16(y) if dtype == tl.bfloat16 else y.to(dtype)


@triton.jit
def through_fp8(y, dtype: tl.constexpr):
    """What the result of `round_to_fp8` becomes in a cast to FP8 and back."""
    if FAST:
        return y.to(dtype).to(tl.float32)
    return y


@triton.jit
def representable(image, F8: tl.constexpr):
    """The FP8 value nearest to image, still in FP32, and 0 for a negative image.

    With FAST image itself, which the cast that follows rounds and saturates. (A negative image is
    due to dithering and above minus half the smallest code: the cast makes it zero.) The cast of
    the interpreter loses the carry from the mantissa into the exponent: 1.97 would become 1.
    """
    if FAST:
        return image
    image = tl.where(image < 0, 0.0, image)
    unit, per_unit = unit_in_last_place(image, F8)
    image = ((image * per_unit + 8388608.0) - 8388608.0) * unit
    return tl.where(image > F8.max, F8.max, image)


@triton.jit
def round_at_random(y, bits, F8: tl.constexpr):
    """`formats.round_at_random`, in FP32; with FAST the cast that follows rounds subnormal ones."""
    dropped: tl.constexpr = 23 - F8.mantissa_bits
    carried = y.to(tl.uint32, bitcast=True) + (bits >> (32 - dropped))
    rounded = (carried >> dropped << dropped).to(tl.float32, bitcast=True)
    finite_or_infinite = y == y  # noqa: PLR0124
    return round_to_fp8(tl.where(finite_or_infinite, rounded, y), F8)


@triton.jit
def round_stochastically(image, noise, x16, F8: tl.constexpr):
    """`formats.stochastic_cast` of image >= 0, for noise in [128, 129) with steps of 2^-16.

    Adding noise carries the value into the next integer with the right probability. A mask then
    drops the fraction, and keeps NaN.
    """
    curvature = 1.0 - 16.0 * reciprocal(x16)
    unit, per_unit = unit_in_last_place(image, F8)
    scaled = image * per_unit
    below = floor_positive(scaled)
    fraction = scaled - below
    bend = (fraction - fraction * fraction) * reciprocal_of_integer(2.0 * below + 1.0)
    carried = curvature[:, None] * bend + scaled + noise
    whole = (carried.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return (whole - 128.0) * unit


@triton.jit
def unit_in_last_place(image, F8: tl.constexpr):
    """The distance between FP8 values around image >= 0, and its reciprocal."""
    exponent = image.to(tl.uint32, bitcast=True) & 0x7F800000
    exponent = tl.maximum(exponent, (127 + F8.min_exponent) << 23)
    unit = (exponent - (F8.mantissa_bits << 23)).to(tl.float32, bitcast=True)
    return unit, (((254 + F8.mantissa_bits) << 23) - exponent).to(tl.float32, bitcast=True)
