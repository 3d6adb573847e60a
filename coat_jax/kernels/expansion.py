"""Dynamic range expansion inside a kernel: the twins of `coat_jax.expansion` and `coat_jax.noise`.

A block is [B, G]: B groups of G neighbours, each thread holding 16 neighbours or so. The
work is bound by issued instructions almost as much as by memory, hence:
    FAST            base-2 logarithm, power, root and reciprocal by their one-instruction
                    approximations (2^-22 relative), which flush denormals to zero;
    per group       everything that depends on the group alone is computed once per group;
    decode          leaves out amax 448^(-1/k), which the caller folds into a product it has
                    to form anyway (`decode_scale`).
Triton's interpreter knows no inline assembly: there FAST is off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from coat_jax.kernels.launch import kernel

if TYPE_CHECKING:
    import triton.language as tl


@kernel
def log2(x, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.log2(x)


@kernel
def exp2(x, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.exp2(x)


@kernel
def sqrt(x, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise(
            "sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.sqrt(x)


@kernel
def reciprocal(x, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return 1.0 / x


@kernel
def floor_positive(x, FAST: tl.constexpr):
    """floor(x) for 0 <= x < 2^22: adding 2^23 while rounding towards zero drops the fraction."""
    if FAST:
        return tl.inline_asm_elementwise(
            "{.reg .f32 t; add.rz.f32 t, $1, 0f4B000000; sub.f32 $0, t, 0f4B000000;}",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return tl.floor(x)


@kernel
def at_least_if_nonzero(x, magnitude, least, FAST: tl.constexpr):
    """max(x, least) where magnitude is not 0, else x."""
    if FAST:
        return tl.inline_asm_elementwise(
            "{.reg .pred p; setp.ne.f32 p, $2, 0f00000000; @p max.f32 $0, $0, $3;}",
            "=f,0,f,f",
            [x, magnitude, least],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return tl.where(magnitude > 0, tl.maximum(x, least), x)


@kernel
def copysign(x, signed):
    sign = signed.to(tl.uint32, bitcast=True) & 0x80000000
    return (x.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@kernel
def mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@kernel
def one_plus_noise(key, run, GROUP: tl.constexpr):
    """1 + noise.uniform for the groups `run`, as [B, G]; even lanes share a hash with odd ones."""
    row = mix(key + run * 0x9E3779B9)
    pair = tl.arange(0, GROUP // 2).to(tl.uint32)
    bits = mix(row[:, None] + pair[None, :] * 0x9E3779B9)
    bits = tl.interleave((bits & 0x7FFFFF) | 0x3F800000, (bits >> 9) | 0x3F800000)
    return bits.to(tl.float32, bitcast=True)


@kernel
def decode_scale(amax, k16, LOG2_MAX: tl.constexpr, FAST: tl.constexpr):
    """What `decode` leaves out, per group: amax 448^(-1/k); and 1/k, which it needs."""
    root = 16.0 * reciprocal(k16.to(tl.float32), FAST)
    return amax * exp2(-LOG2_MAX * root, FAST), root


@kernel
def decode(codes, root, FAST: tl.constexpr):
    """|code|^(1/k): the magnitude, but for the factor `decode_scale`."""
    return exp2(log2(tl.abs(codes), FAST) * root[:, None], FAST)


@kernel
def fit(magnitude, LOG2_RANGE: tl.constexpr, MIN_K16: tl.constexpr, FAST: tl.constexpr):
    """Per group: amax, its logarithm, and 16 k."""
    SMALLEST: tl.constexpr = 9.4039548065783e-38
    amax = tl.minimum(tl.max(magnitude, axis=1), 3.4028234663852886e38)
    amax = tl.where(amax < SMALLEST, 0.0, amax)
    # As unsigned integers minus one, zeros are the largest and do not count as the minimum.
    above_zero = magnitude.to(tl.uint32, bitcast=True) - 1
    smallest = (tl.min(above_zero, axis=1) + 1).to(tl.float32, bitcast=True)
    log2_amax = log2(tl.maximum(amax, SMALLEST), FAST)
    spread = log2_amax - log2(smallest, FAST)
    k16 = 16.0 * LOG2_RANGE * reciprocal(tl.maximum(spread, 1e-6), FAST)
    k16 = tl.floor(k16 + 1 / 64)
    k16 = tl.minimum(tl.maximum(k16, MIN_K16), 255.0)
    return amax, log2_amax, k16


@kernel
def expand(
    magnitude, log2_amax, k16, LOG2_MAX: tl.constexpr, TINY: tl.constexpr, FAST: tl.constexpr
):
    """448 (magnitude / amax)^k, where a non-zero is at least the smallest code.

    3e-6 too large, so that the approximate power does not put the largest under 448, where
    stochastic rounding could round it down. Above, it saturates.
    """
    k = k16 * (1.0 / 16.0)
    log2_ratio = log2(magnitude, FAST) - log2_amax[:, None]
    image = exp2(log2_ratio * k[:, None] + (LOG2_MAX + 4e-6), FAST)
    return at_least_if_nonzero(image, magnitude, TINY, FAST)


@kernel
def reciprocal_of_integer(x, FAST: tl.constexpr):
    """1 / x within 0.4 %, for weights: from one integer subtraction (6 %) and a Newton step."""
    if FAST:
        guess = (0x7EF127EA - x.to(tl.uint32, bitcast=True)).to(tl.float32, bitcast=True)
        return guess * (2.0 - x * guess)
    return 1.0 / x


@kernel
def unit_in_last_place(image, MIN_EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):
    """The distance of FP8 values around image >= 0, and its reciprocal."""
    exponent = image.to(tl.uint32, bitcast=True) & 0x7F800000
    exponent = tl.maximum(exponent, (127 + MIN_EXPONENT) << 23)
    unit = (exponent - (MANTISSA << 23)).to(tl.float32, bitcast=True)
    return unit, (((254 + MANTISSA) << 23) - exponent).to(tl.float32, bitcast=True)


@kernel
def round_stochastically(
    image, one_plus_u, k16, MIN_EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, FAST: tl.constexpr
):
    """`formats.stochastic_cast` of image >= 0, exact in FP8, for the cast that follows."""
    curvature = 1.0 - 16.0 * reciprocal(k16, FAST)
    unit, per_unit = unit_in_last_place(image, MIN_EXPONENT, MANTISSA)
    scaled = image * per_unit
    below = floor_positive(scaled, FAST)
    fraction = scaled - below
    bend = curvature[:, None] * reciprocal_of_integer(2.0 * below + 1.0, FAST)
    probability = fraction + bend * (fraction - fraction * fraction)
    return tl.where(one_plus_u < 1.0 + probability, below + 1.0, below) * unit


@kernel
def representable(
    image, MAX: tl.constexpr, MIN_EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, FAST: tl.constexpr
):
    """The nearest FP8 value of image >= 0, for the cast that follows.

    The hardware's cast rounds and saturates by itself. The interpreter's loses the carry
    from the mantissa into the exponent: 1.97 would become 1.
    """
    if FAST:
        return image
    unit, per_unit = unit_in_last_place(image, MIN_EXPONENT, MANTISSA)
    image = ((image * per_unit + 8388608.0) - 8388608.0) * unit
    return tl.where(image > MAX, MAX, image)
