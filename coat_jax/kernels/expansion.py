"""Dynamic range expansion inside a kernel: the twins of `numerics.expansion` and `numerics.noise`.

A block is [B, G]: B groups of G neighbours, each thread holding 16 neighbours or so. The
work is bound by issued instructions almost as much as by memory, hence:
    FAST         base-2 logarithm, power, root and reciprocal by their one-instruction
                 approximations (2^-22 relative), which flush denormals to zero;
    per group    everything that depends on the group alone is computed once per group;
    decode       adds the logarithms of amax and of the decay inside the power;
    noise        random bits become the mantissa of a float, by their place under the bits of one
                 whose last place is right (the format's base): adding it is all that is left.
Triton's interpreter knows no inline assembly: there FAST is off.

A format with its rounding is a tuple, from `adam_launch`, which says what its entries are.
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
    return tl.log2(tl.where(x < 1.1754943508222875e-38, 0.0, x))


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
def rsqrt(x, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise(
            "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return 1.0 / tl.sqrt(x)


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
def clip(x, limit, FAST: tl.constexpr):
    """x with its magnitude limited; NaN stays."""
    if FAST:
        return tl.inline_asm_elementwise(
            "min.NaN.xorsign.abs.f32 $0, $1, $2;",
            "=f,f,f",
            [x, limit],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    clipped = tl.minimum(tl.maximum(x, -limit), limit)
    return tl.where(x == x, clipped, x)  # noqa: PLR0124


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
def noise_bits(key, run, BASE: tl.constexpr, OTHER_BASE: tl.constexpr, GROUP: tl.constexpr,
               FAST: tl.constexpr):  # fmt: skip
    """Per element of the groups `run`, as [B, G]: 16 random bits, and those of its neighbour.

    A hash of 32 bits serves two neighbours, the lower half the even one. Its halves are put under
    the bits of BASE.
    """
    row = mix(key + run * 0x9E3779B9)
    pair = tl.arange(0, GROUP // 2).to(tl.uint32)
    bits = mix(row[:, None] + pair[None, :] * 0x9E3779B9)
    own = tl.interleave(lower_half(bits, BASE, FAST), upper_half(bits, BASE, FAST))
    other = tl.interleave(upper_half(bits, OTHER_BASE, FAST), lower_half(bits, OTHER_BASE, FAST))
    return own, other


@kernel
def lower_half(bits, BASE: tl.constexpr, FAST: tl.constexpr):
    return (bits & 0xFFFF) | BASE


@kernel
def upper_half(bits, BASE: tl.constexpr, FAST: tl.constexpr):
    if FAST:  # one instruction instead of two
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7632;",
            "=r,r,r",
            [bits, BASE],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    return (bits >> 16) | BASE


@kernel
def decode(codes, amax, k16, log2_factor, LOG2_MAX: tl.constexpr, FAST: tl.constexpr):
    """Magnitudes times a factor:  2^((log2 |code| - LOG2_MAX) / k + log2 amax + log2_factor)."""
    root = 16.0 * reciprocal(k16.to(tl.float32), FAST)
    offset = log2(amax, FAST) + log2_factor - LOG2_MAX * root
    return exp2(log2(tl.abs(codes), FAST) * root[:, None] + offset[:, None], FAST)


@kernel
def encode(magnitude, noise, FORMAT: tl.constexpr, FAST: tl.constexpr):
    """Magnitudes as the codes they are rounded to, in FP32 for the cast that follows; amax, 16 k.

    `noise` is from `noise_bits` on top of the format's base.
    """
    amax, log2_amax, k16 = fit(magnitude, FORMAT[5], FORMAT[6], FORMAT[7], FAST)
    image = expand(magnitude, log2_amax, k16, FORMAT[0], FAST)
    if FORMAT[8] == 1:
        # Noise is uniform in 2^7 + [0, 1) smallest codes; its sign does not matter.
        TINY: tl.constexpr = FORMAT[1]
        image += 128.5 * TINY - noise.to(tl.float32, bitcast=True)
    if FORMAT[8] == 2:
        noise = noise.to(tl.float32, bitcast=True)
        image = round_stochastically(image, noise, k16, FORMAT[3], FORMAT[4], FAST)
    return representable(image, FORMAT[2], FORMAT[3], FORMAT[4], FAST), amax, k16


@kernel
def fit(
    magnitude,
    LOG2_RANGE: tl.constexpr,
    MIN_K16: tl.constexpr,
    TOLERANCE: tl.constexpr,
    FAST: tl.constexpr,
):
    """Per group: amax, its logarithm, and 16 k, rounded down but for TOLERANCE."""
    SMALLEST: tl.constexpr = 1.1754943508222875e-38
    SMALLEST_BITS: tl.constexpr = 0x00800000
    amax = tl.minimum(tl.max(magnitude, axis=1), 3.4028234663852886e38)
    amax = tl.where(amax < SMALLEST, 0.0, amax)
    # As unsigned integers less the smallest normal number, zero and denormals are the largest and
    # do not count as the minimum.
    above = magnitude.to(tl.uint32, bitcast=True) - SMALLEST_BITS
    smallest = (tl.min(above, axis=1) + SMALLEST_BITS).to(tl.float32, bitcast=True)
    log2_amax = log2(tl.maximum(amax, SMALLEST), FAST)
    spread = log2_amax - log2(smallest, FAST)
    k16 = 16.0 * LOG2_RANGE * reciprocal(tl.maximum(spread, 1e-6), FAST)
    k16 = tl.floor(k16 + TOLERANCE)
    k16 = tl.minimum(tl.maximum(k16, MIN_K16), 255.0)
    return amax, log2_amax, k16


@kernel
def expand(magnitude, log2_amax, k16, LOG2_MAX: tl.constexpr, FAST: tl.constexpr):
    """448 (magnitude / amax)^k.

    3e-6 too large, so that the approximate power does not put the largest under 448, where
    stochastic rounding could round it down. Above, it saturates.
    """
    k = k16 * (1.0 / 16.0)
    log2_ratio = log2(magnitude, FAST) - log2_amax[:, None]
    return exp2(log2_ratio * k[:, None] + (LOG2_MAX + 4e-6), FAST)


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
    image, noise, k16, MIN_EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, FAST: tl.constexpr
):
    """`formats.stochastic_cast` of image >= 0. `noise` is 128 + 16 bits / 2^16.

    Rounds up where noise and probability carry into the next integer, and cuts the rest off
    (which leaves NaN what it is).
    """
    curvature = 1.0 - 16.0 * reciprocal(k16, FAST)
    unit, per_unit = unit_in_last_place(image, MIN_EXPONENT, MANTISSA)
    scaled = image * per_unit
    below = floor_positive(scaled, FAST)
    fraction = scaled - below
    bend = (fraction - fraction * fraction) * reciprocal_of_integer(2.0 * below + 1.0, FAST)
    carried = curvature[:, None] * bend + scaled + noise
    whole = (carried.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return (whole - 128.0) * unit


@kernel
def representable(
    image, MAX: tl.constexpr, MIN_EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, FAST: tl.constexpr
):
    """The nearest FP8 value of image, zero for a negative one, for the cast that follows.

    The hardware's cast rounds and saturates by itself; what dithering made negative is less than
    half the smallest code and becomes zero. The interpreter's loses the carry from the mantissa
    into the exponent: 1.97 would become 1.
    """
    if FAST:
        return image
    image = tl.where(image < 0, 0.0, image)
    unit, per_unit = unit_in_last_place(image, MIN_EXPONENT, MANTISSA)
    image = ((image * per_unit + 8388608.0) - 8388608.0) * unit
    return tl.where(image > MAX, MAX, image)
