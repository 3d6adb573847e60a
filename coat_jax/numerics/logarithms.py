"""8-bit logarithms, for numbers that are never negative, such as Adam's second moments.

    encode    code = 255 - 16 k log2(amax / x)
    decode    x = amax 2^(-(255 - code) / (16 k)),    zero for code 0

This is dynamic range expansion (`numerics.expansion`) to another format: raised to the power k, a
group is spread over the 15.9 binades of a code that has 16 values per binade and no sign. There
are 16 k codes per binade of x, with a constant ratio between neighbours. FP8 at the same k has
8 k, because half of its codes are negative, and it loses some of these to subnormal numbers.

Each group stores `amax` in FP32 and 16 k in one byte. 16 k is rounded down so that the smallest
element of the group still has a code, but is at least 7: values more than 36 binades below `amax`
are rounded to the smallest code or to zero.

Laws, for finite input of any shape:
    zero stays zero;
    the largest of a group is exact, so a constant group is exact;
    no result is infinite or NaN;
    with noise, the decoded value is right on average.
Denormal magnitudes count as zero, as in `expansion`; so do NaN and negative numbers. Infinity
becomes the largest FP32.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from coat_jax.numerics.expansion import (
    STEPS,
    Expanded,
    ExponentFit,
    exponent_sixteenths,
    in_groups,
)
from coat_jax.numerics.formats import SMALLEST_NORMAL
from coat_jax.numerics.groups import group_max, join_groups, split_groups, to_groups
from coat_jax.numerics.one_program import one_program

DTYPE = jnp.uint8
LARGEST_CODE = 255
MIN_STEPS = 7  # the fewest codes per binade
# Without the tolerance of `expansion`: with it an element just below the smallest code would be
# rounded up to that code, so that a slowly decaying element would not decay.
FIT = ExponentFit((LARGEST_CODE - 1) / STEPS, MIN_STEPS, tolerance=0.0)
RESOLUTION = 2.0 ** (-(LARGEST_CODE - 1) / MIN_STEPS)  # the smallest of a group whose largest is 1
LOG2 = 0.6931471805599453  # the natural logarithm of 2


@one_program("x", "noise")
def encode(
    x: Float[Array, "*rows D"],
    *,
    group_size: int,
    noise: Float[Array, "*rows D"] | None = None,
) -> Expanded:
    """Rounds `x` to the nearest code, or with `noise` (uniform in (0, 1)) stochastically."""
    values = to_groups(x, group_size)
    values = jnp.where(values >= SMALLEST_NORMAL, values, 0.0)
    amax = group_max(values)
    log2_amax = jnp.log2(jnp.maximum(amax, SMALLEST_NORMAL))[..., None]
    log2_below = log2_amax - jnp.log2(values)  # inf for zero
    # Exactly zero for the largest: the difference of two rounded logarithms could round it down.
    log2_below = jnp.where(values >= amax[..., None], 0.0, log2_below)
    log2_below = jnp.where(values > 0, log2_below, jnp.inf)
    least_value = jnp.min(jnp.where(values > 0, values, jnp.inf), axis=-1, initial=jnp.inf)
    exponent_x16 = exponent_sixteenths(amax, jnp.where(amax > 0, least_value, 0.0), FIT)
    steps = exponent_x16[..., None].astype(jnp.float32)
    exact = LARGEST_CODE - steps * log2_below

    # Numbers below the smallest code become that code or zero. Apart from rounding errors of
    # `steps`, only groups at the smallest k have such numbers.
    smallest = jnp.where(steps > MIN_STEPS, SMALLEST_NORMAL, amax[..., None] * RESOLUTION)
    if noise is None:
        codes = jnp.floor(exact + 0.5)
        least = (values >= smallest / 2).astype(jnp.float32)
    else:
        noise = split_groups(noise, group_size)
        whole = jnp.floor(exact)
        fraction = exact - whole
        # Unbiased in x, not in its logarithm, which is concave.
        bend = LOG2 / (2 * steps) * fraction * (1 - fraction)
        codes = whole + (noise < fraction - bend).astype(jnp.float32)
        least = (noise < values / smallest).astype(jnp.float32)
    codes = jnp.where(exact >= 1, codes, jnp.where(values > 0, least, 0.0))
    return in_groups(codes.astype(DTYPE), amax, exponent_x16, x.shape, group_size)


@one_program("e")
def decode(e: Expanded, *, group_size: int) -> Float[Array, "*rows D"]:
    """Returns the FP32 values of `e`."""
    codes = split_groups(e.codes, group_size).astype(jnp.float32)
    groups = codes.shape[:-1]
    steps = e.exponent_x16.reshape(groups)[..., None].astype(jnp.float32)
    amax = e.amax.reshape(groups)[..., None]
    values = amax * jnp.exp2((codes - LARGEST_CODE) / steps)
    return join_groups(jnp.where(codes > 0, values, 0.0), e.codes.shape)
