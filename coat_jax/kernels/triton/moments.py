"""Decoding and encoding of Adam's moments: the counterpart of `coat_jax.storage`.

Blocks are [B, G], as in `expansion`. MU and NU are the `MomentFormat`s of the first and the second
moment.

Integer codes (`numerics.integers`, `numerics.logarithms`) are computed by adding 1.5 * 2^23 and
rounding down: the code is then the last byte of the sum, and needs no conversion. Their noise is in
[128, 129): 16 random bits under the bits of 128.
"""

import triton
import triton.language as tl

from coat_jax.kernels.triton.arithmetic import (
    FAST,
    clip,
    copysign,
    exp2,
    floor_positive,
    log2,
    reciprocal,
    rsqrt,
    sqrt,
)
from coat_jax.kernels.triton.expansion import decode, encode, fit


@triton.jit
def load_codes(pointers, mask, FORMAT: tl.constexpr):
    """Loads codes as FP32."""
    if FORMAT.is_integer:
        codes = tl.load(pointers, mask=mask, other=0)
    else:
        codes = tl.load(pointers, mask=mask, other=0.0)
    return codes.to(tl.float32)


@triton.jit
def read_moments(
    mu, mu_amax, mu_x16, nu, nu_amax, nu_x16, log2_b1, log2_b2,
    MU: tl.constexpr, NU: tl.constexpr,
):  # fmt: skip
    """Decodes the moments, and returns b1 m and b2 v."""
    if NU.is_integer:
        root = decode_root(nu, nu_amax, nu_x16)
        v = root * (root * exp2(log2_b2))  # finite in this order
    else:
        v = decode(nu, nu_amax, nu_x16, log2_b2, NU)
        if MU.is_integer:
            root = sqrt(decode(nu, nu_amax, nu_x16, 0.0, NU))
    if MU.is_integer:
        smallest = sqrt(smallest_second(nu_amax, NU))
        scale = mu_amax * (1.0 / 127.0) * exp2(log2_b1)
        m = mu * scale[:, None] * tl.maximum(root, smallest[:, None])
    else:
        m = copysign(decode(mu, mu_amax, mu_x16, log2_b1, MU), mu)
    return m, v


@triton.jit
def encode_second(v, noise, NU: tl.constexpr):
    """The codes of v for the cast that follows; amax; 16 k."""
    if NU.is_integer:
        codes, amax, x16 = encode_logarithms(v, noise, NU)
    else:
        codes, amax, x16 = encode(v, noise, NU)
    return codes, amax, x16


@triton.jit
def encode_first(m, noise, v, nu_amax, stochastic_below, MU: tl.constexpr, NU: tl.constexpr):
    """The codes of m for the cast that follows; amax; 16 k. `nu_amax` is that of the new v."""
    if MU.is_integer:
        direction = m * rsqrt(tl.maximum(v, smallest_second(nu_amax, NU)[:, None]))
        codes, amax, x16 = encode_integers(
            direction, noise, stochastic_below, MU.rounding != "nearest"
        )
    else:
        codes, amax, x16 = encode(tl.abs(m), noise, MU)
        codes = copysign(codes, m)
    return codes, amax, x16


@triton.jit
def smallest_second(amax, NU: tl.constexpr):
    """The least second moment that a direction is divided by, per group."""
    return tl.maximum(amax * NU.smallest_second, 1.1754943508222875e-38)


@triton.jit
def decode_root(codes, amax, x16):
    """The square roots of numbers that are stored as logarithms."""
    half = 0.5 * reciprocal(x16.to(tl.float32))
    offset = 0.5 * log2(amax) - 255.0 * half
    root = exp2(codes * half[:, None] + offset[:, None])
    return tl.where(codes == 0.0, 0.0, root)


@triton.jit
def encode_logarithms(x, noise, FORMAT: tl.constexpr):
    """The codes of non-negative numbers as logarithms; amax; 16 k."""
    amax, log2_amax, x16 = fit(x, FORMAT)
    exact = 255.0 - x16[:, None] * (log2_amax[:, None] - log2(x))
    if FORMAT.rounding != "nearest":
        noise = noise.to(tl.float32, bitcast=True) - 128.0
        fraction = exact - floor_positive(exact)
        bend = 0.34657359027997264 * reciprocal(x16)  # log(2) / 2k
        rounded = exact - (fraction - fraction * fraction) * bend[:, None]
    else:
        noise = 0.5
        rounded = exact
    codes = last_byte(floor_to_bits(rounded + noise))
    # A value below the smallest code becomes that code or zero. Apart from rounding errors this
    # occurs only at the smallest k.
    LARGEST: tl.constexpr = 8.507059173023462e37  # 2^126: times this, any normal number is >= 1
    per_smallest = tl.where(
        x16 > FORMAT.fit.min_steps, LARGEST, reciprocal(amax * FORMAT.smallest_second)
    )
    least = tl.where(x * per_smallest[:, None] + noise >= 1.0, 1, 0)
    return tl.where(exact >= 1.0, codes, least), amax, x16


@triton.jit
def encode_integers(x, noise, stochastic_below, STOCHASTIC: tl.constexpr):
    """The codes of signed numbers as integers; amax; 16 k."""
    amax = tl.minimum(tl.max(tl.abs(x), axis=1), 1.2676506002282294e30)
    amax = tl.where(amax < 7.888609052210118e-31, 0.0, amax)
    per_amax = tl.where(amax > 0.0, 127.0 * reciprocal(amax), 0.0)
    exact = clip(x * per_amax[:, None], 127.0)
    if STOCHASTIC:
        noise = noise.to(tl.float32, bitcast=True) - 128.0
        noise = tl.where(tl.abs(exact) < stochastic_below, noise, 0.5)
    else:
        noise = 0.5
    x16 = tl.full(amax.shape, 16, tl.int32)
    codes = last_byte(floor_to_bits(exact + noise))
    return codes, amax, x16


@triton.jit
def floor_to_bits(x):
    """An integer whose last byte is that of floor(x) for |x| < 2^22, and of -1 for NaN."""
    if FAST:
        return tl.inline_asm_elementwise(
            "add.rm.f32 $0, $1, 0f4B400000;", "=r,f", [x], dtype=tl.int32, is_pure=True, pack=1
        )
    return tl.floor(tl.where(tl.abs(x) < 4194304.0, x, -1.0)).to(tl.int32)


@triton.jit
def last_byte(x):
    """The last byte of an integer."""
    return x & 0xFF
