"""FP8 inside a kernel: the twins of `coat_jax.numerics.blocks`, and activations.

The largest magnitude is found among bit patterns, as integers: there NaN and infinity are the
largest of all and cannot get lost, as they would in a floating-point maximum.

Hardware casts to FP8 round to nearest and saturate. Triton's interpreter does neither well:
where FAST is off, values are rounded before they are cast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from coat_jax.kernels.expansion import copysign, exp2, reciprocal, representable
from coat_jax.kernels.launch import kernel

if TYPE_CHECKING:
    import triton.language as tl


@kernel
def magnitude_bits(x):
    """|x| as an integer, which orders as |x| does."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@kernel
def fitting_exponent(bits, TOP: tl.constexpr):
    """`blocks.fitting_exponent` of a maximum of `magnitude_bits`; 2^TOP is in the top binade."""
    exponent = tl.maximum(((bits + 0x1FFFFF) >> 23) - TOP, 1)
    return tl.where(bits < 0x7F800000, exponent, 255)


@kernel
def power_of_two(exponent):
    """2^(exponent - 127)."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@kernel
def inverse_power(exponent):
    """Its reciprocal; of 255 NaN."""
    bits = (254 - tl.minimum(exponent, 253)) << 23
    return tl.where(exponent == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@kernel
def rounded(
    y, MAX: tl.constexpr, MIN_EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, FAST: tl.constexpr
):
    """The FP8 value nearest to y, for the cast that follows; left to the cast where FAST."""
    if FAST:
        return y
    return copysign(representable(tl.abs(y), MAX, MIN_EXPONENT, MANTISSA, FAST), y)


@kernel
def through_fp8(y, dtype: tl.constexpr, FAST: tl.constexpr):
    """y after a round trip through FP8, if `rounded` has not done it."""
    if FAST:
        return y.to(dtype).to(tl.float32)
    return y


@kernel
def decoded(
    codes, exponents, row, lane, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr
):
    """One row of blocks, in FP32."""
    block = tl.arange(0, WIDTH // SIZE)
    blocks: tl.constexpr = (COLUMNS + SIZE - 1) // SIZE
    q = tl.load(codes + row * COLUMNS + lane, mask=lane < COLUMNS, other=0.0).to(tl.float32)
    e = tl.load(exponents + row * blocks + block, mask=block < blocks, other=127).to(tl.int32)
    values = tl.reshape(q, [WIDTH // SIZE, SIZE]) * power_of_two(e)[:, None]
    return tl.reshape(values, [WIDTH])


@kernel
def sigmoid(x, FAST: tl.constexpr):
    return reciprocal(1.0 + exp2(-1.4426950408889634 * x, FAST), FAST)


@kernel
def activation(x, NAME: tl.constexpr, FAST: tl.constexpr):
    """act(x), and its derivative."""
    if NAME == "silu":
        s = sigmoid(x, FAST)
        value = x * s
        slope = s + value * (1.0 - s)
    elif NAME == "gelu":
        density = 0.3989422804014327 * exp2(-0.7213475204444817 * x * x, FAST)
        cumulative = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
        value = x * cumulative
        slope = cumulative + x * density
    elif NAME == "gelu_tanh":
        inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        s = sigmoid(inner, FAST)
        value = x * s
        slope = s + value * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    elif NAME == "relu":
        value = tl.maximum(x, 0.0)
        slope = tl.where(x > 0, 1.0, 0.0)
    else:
        tl.static_assert(NAME == "relu2", "no activation of this name")
        slope = 2.0 * tl.maximum(x, 0.0)
        value = 0.25 * slope * slope
    return value, slope
