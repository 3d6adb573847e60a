"""Directions and logarithms inside a kernel: the twins of `coat_jax.integers` and `.logarithms`.

A block is [B, G], as in `kernels.expansion`. Noise is 128 + [0, 1), 16 random bits under the bits
of 128. Codes come out as integers, for the cast to 8 bits that follows. Numbers become integers
by adding 2^23 (or 1.5 times that, for negative ones) while rounding down: the code is then in the
last bits of the sum, and no conversion is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from coat_jax.kernels.expansion import clip, exp2, fit, floor_positive, log2, reciprocal, rsqrt
from coat_jax.kernels.launch import kernel

if TYPE_CHECKING:
    import triton.language as tl


@kernel
def decode_root(codes, amax, k16, FAST: tl.constexpr):
    """The roots of numbers that are stored as logarithms."""
    half = 0.5 * reciprocal(k16.to(tl.float32), FAST)
    offset = 0.5 * log2(amax, FAST) - 255.0 * half
    root = exp2(codes * half[:, None] + offset[:, None], FAST)
    return tl.where(codes == 0.0, 0.0, root)


@kernel
def encode_logarithms(
    x, noise, STOCHASTIC: tl.constexpr, RESOLUTION: tl.constexpr, FAST: tl.constexpr
):
    """The codes of numbers that are not negative; amax, 16 k."""
    MIN_K16: tl.constexpr = 7.0
    amax, log2_amax, k16 = fit(x, 254.0 / 16.0, MIN_K16, FAST)
    exact = 255.0 - k16[:, None] * (log2_amax[:, None] - log2(x, FAST))
    if STOCHASTIC:
        noise = noise.to(tl.float32, bitcast=True) - 128.0
        fraction = exact - floor_positive(exact, FAST)
        bend = 0.34657359027997264 * reciprocal(k16, FAST)  # log(2) / 2k
        rounded = exact - (fraction - fraction * fraction) * bend[:, None]
    else:
        noise = 0.5
        rounded = exact
    codes = last_byte(floor_to_bits(rounded + noise, FAST))
    # Below the smallest code: it or zero. Only at the smallest k there are such numbers.
    per_smallest = tl.where(
        k16 > MIN_K16, 8.507059173023462e37, reciprocal(amax * RESOLUTION, FAST)
    )
    least = tl.where(x * per_smallest[:, None] + noise >= 1.0, 1, 0)
    return tl.where(exact >= 1.0, codes, least), amax, k16


@kernel
def directions(m, v, amax, RESOLUTION: tl.constexpr, FAST: tl.constexpr):
    """m / sqrt(v), with at least the smallest v that the group can hold."""
    SMALLEST: tl.constexpr = 1.1754943508222875e-38
    smallest = tl.maximum(amax * RESOLUTION, SMALLEST)
    ratio = m * rsqrt(tl.maximum(v, smallest[:, None]), FAST)
    return tl.where(ratio == ratio, ratio, 0.0)  # noqa: PLR0124, NaN is not stored


@kernel
def encode_integers(x, noise, stochastic_below, STOCHASTIC: tl.constexpr, FAST: tl.constexpr):
    """The codes of numbers of any sign, and amax."""
    SMALLEST: tl.constexpr = 1.1754943508222875e-38
    amax = tl.minimum(tl.max(tl.abs(x), axis=1), 3.4028234663852886e38)
    amax = tl.where(amax < SMALLEST, 0.0, amax)
    per_amax = tl.where(amax > 0.0, 127.0 * reciprocal(amax, FAST), 0.0)
    exact = clip(x * per_amax[:, None], 127.0, FAST)
    if STOCHASTIC:
        noise = noise.to(tl.float32, bitcast=True) - 128.0
        noise = tl.where(tl.abs(exact) < stochastic_below, noise, 0.5)
    else:
        noise = 0.5
    return last_byte(floor_to_bits(exact + noise, FAST)), amax


@kernel
def floor_to_bits(x, FAST: tl.constexpr):
    """An integer whose last byte is that of floor(x), for |x| < 2^22."""
    if FAST:
        return tl.inline_asm_elementwise(
            "add.rm.f32 $0, $1, 0f4B400000;", "=r,f", [x], dtype=tl.int32, is_pure=True, pack=1
        )
    return tl.floor(tl.where(tl.abs(x) < 4194304.0, x, 0.0)).to(tl.int32)


@kernel
def last_byte(x):
    return x & 0xFF
