"""Dynamic range expansion of Adam's moments: the counterpart of `coat_jax.numerics.expansion`.

A block is [B, G]: B groups of G elements, of which a thread holds about 16 neighbours. The work is
bound by issued instructions almost as much as by memory. So whatever depends on the group alone is
computed once per group, and decoding adds the logarithms of amax and of the decay inside the power.

FORMAT is a `moment_format.MomentFormat`.
"""

import triton
import triton.language as tl

from coat_jax.kernels.triton.arithmetic import exp2, log2, reciprocal
from coat_jax.kernels.triton.formats import representable, round_stochastically


@triton.jit
def decode(codes, amax, x16, log2_factor, FORMAT: tl.constexpr):
    """Magnitudes times a factor:  2^((log2 |code| - log2_max) / k + log2 amax + log2_factor)."""
    root = 16.0 * reciprocal(x16.to(tl.float32))
    offset = log2(amax) + log2_factor - FORMAT.log2_max * root
    return exp2(log2(tl.abs(codes)) * root[:, None] + offset[:, None])


@triton.jit
def encode(magnitude, noise, FORMAT: tl.constexpr):
    """The codes of magnitudes, in FP32 for the cast that follows; amax; 16 k.

    `noise` comes from `noise_bits`, with the format's noise_base.
    """
    F8: tl.constexpr = FORMAT.fp8
    amax, log2_amax, x16 = fit(magnitude, FORMAT)
    image = expand(magnitude, log2_amax, x16, FORMAT)
    if FORMAT.rounding == "dithered":
        # Noise is uniform in [128, 129) smallest codes; subtracting it is as good as adding it.
        image += 128.5 * F8.tiny - noise.to(tl.float32, bitcast=True)
    if FORMAT.rounding == "stochastic":
        noise = noise.to(tl.float32, bitcast=True)
        image = round_stochastically(image, noise, x16, F8)
    return representable(image, F8), amax, x16


@triton.jit
def fit(magnitude, FORMAT: tl.constexpr):
    """Per group: amax, its logarithm, and 16 k, rounded down after adding a tolerance."""
    SMALLEST: tl.constexpr = 1.1754943508222875e-38
    SMALLEST_BITS: tl.constexpr = 0x00800000
    amax = tl.minimum(tl.max(magnitude, axis=1), 3.4028234663852886e38)
    amax = tl.where(amax < SMALLEST, 0.0, amax)
    # The minimum over normal numbers: as unsigned integers, after subtracting the smallest normal
    # number, zero and denormals wrap around to the largest values.
    above = magnitude.to(tl.uint32, bitcast=True) - SMALLEST_BITS
    smallest = (tl.min(above, axis=1) + SMALLEST_BITS).to(tl.float32, bitcast=True)
    log2_amax = log2(tl.maximum(amax, SMALLEST))
    spread = log2_amax - log2(smallest)
    x16 = 16.0 * FORMAT.fit.log2_range * reciprocal(tl.maximum(spread, 1e-6))
    x16 = tl.floor(x16 + FORMAT.fit.tolerance)
    x16 = tl.minimum(tl.maximum(x16, FORMAT.fit.min_steps), 255.0)
    return amax, log2_amax, x16


@triton.jit
def expand(magnitude, log2_amax, x16, FORMAT: tl.constexpr):
    """max (magnitude / amax)^k, where max is the largest code.

    The result is made too large by a relative 3e-6. Otherwise the approximate power of the largest
    element could be below the largest code, and be rounded down at random. Above, it saturates.
    """
    k = x16 * (1.0 / 16.0)
    log2_ratio = log2(magnitude) - log2_amax[:, None]
    return exp2(log2_ratio * k[:, None] + (FORMAT.log2_max + 4e-6))
