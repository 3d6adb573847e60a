"""Dynamic range expansion: FP8 for groups of numbers that are all of similar size.

    encode    q = fp8(F sign(x) (|x| / amax)^k)        F = 448, the largest E4M3
    decode    x = sign(q) amax (|q| / F)^(1/k)
    k         log(range of FP8) / log(amax / min|x|)   in sixteenths

A group of Adam moments spans 1e1 .. 1e3, of the 2e5 that E4M3 can tell apart. Raised to
the power k the group fills the format, and rounding errors shrink by k (equation 3 of
COAT, arXiv 2410.19313). Stored per group of 128: `amax` in FP32 and 16 k in one byte.

Laws, for finite input of any shape:
    zero stays zero, and a non-zero never becomes zero;
    the largest of a group is exact, so a constant group is exact;
    nothing non-finite comes out.
Magnitudes under 2^-123 count as zero: XLA flushes denormals, and
rounding down may divide by 4. NaN stays NaN in its own
place and touches no neighbour; infinity becomes the largest FP32.

What is too small for the smallest code is rounded up to it. Hence how far down k goes:

    nearest      1, where it is plain scaled FP8: one stray tiny member would otherwise
                 coarsen all others
    stochastic   1/2, and the smallest member is placed two binades above the smallest code:
                 a member at that code could be rounded up only, and would never sink
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from coat_jax.formats import E4M3, format_of, saturating_cast, stochastic_cast
from coat_jax.qtensor import (
    group_max,
    join_groups,
    require_float,
    scales_shape,
    split_groups,
)

GROUP_SIZE = 128
SMALLEST = 2.0**-123
STEPS = 16  # k is stored in sixteenths
MAX_STEPS = 255
HEADROOM = 2  # binades under the smallest member, where rounding is stochastic
# Added before 16 k is rounded down. A group whose smallest member got the smallest code must get
# the same k when it is encoded again, whatever the logarithms' rounding: else k, and with it the
# smallest member, would sink a little at every step.
TOLERANCE = 1 / 64


class Fit(NamedTuple):
    """How k is chosen: the binades that a group is spread over, and the least 16 k."""

    log2_range: float
    min_steps: int


def fit_of(dtype: DTypeLike, *, stochastic: bool) -> Fit:
    """The choice of k for a format and a rounding; see above."""
    log2_range = format_of(dtype).log2_range
    return Fit(log2_range - HEADROOM, STEPS // 2) if stochastic else Fit(log2_range, STEPS)


class Expanded(NamedTuple):
    """An array in expanded FP8, or a tree of them: three trees of the same structure."""

    codes: Float[Array, "*rows D"]  # FP8, the array's shape
    amax: Float[Array, "*rows G"]  # FP32, the largest magnitude of each group
    k16: UInt8[Array, "*rows G"]  # 16 times the exponent of each group


def encode(
    x: Float[Array, "*rows D"],
    dtype: DTypeLike = E4M3,
    *,
    group_size: int = GROUP_SIZE,
    noise: Float[Array, "*rows D"] | None = None,
) -> Expanded:
    """Rounds `x` to expanded FP8: to nearest, or with `noise` (uniform in [0, 1)) stochastically.

    Stochastic rounding is unbiased in x itself, not in its expanded image.
    """
    require_float("x", x.dtype)
    fmt = format_of(dtype)
    grouped = split_groups(x.astype(jnp.float32), group_size)
    magnitude = jnp.abs(grouped)
    magnitude = jnp.where(magnitude < SMALLEST, 0.0, magnitude)
    amax = group_max(magnitude)
    smallest = jnp.min(jnp.where(magnitude > 0, magnitude, jnp.inf), axis=-1, initial=jnp.inf)
    smallest = jnp.where(amax > 0, smallest, 0.0)
    k16 = exponent_sixteenths(amax, smallest, fit_of(dtype, stochastic=noise is not None))
    k = k16[..., None].astype(jnp.float32) / STEPS
    log2_ratio = jnp.log2(magnitude) - jnp.log2(jnp.maximum(amax, SMALLEST))[..., None]
    image = fmt.max * jnp.exp2(k * log2_ratio)
    image = jnp.where(magnitude > 0, jnp.maximum(image, fmt.tiny), image)
    image = jnp.copysign(image, grouped)
    if noise is None:
        codes = saturating_cast(image, dtype)
    else:
        codes = stochastic_cast(image, dtype, split_groups(noise, group_size), curvature=1 - 1 / k)
    shape = scales_shape(x.shape, group_size)
    return Expanded(join_groups(codes, x.shape), amax.reshape(shape), k16.reshape(shape))


def decode(e: Expanded, *, group_size: int = GROUP_SIZE) -> Float[Array, "*rows D"]:
    """Returns the FP32 values that `e` stands for."""
    fmt = format_of(e.codes.dtype)
    grouped = split_groups(e.codes, group_size).astype(jnp.float32)
    per_group = grouped.shape[:-1]
    k = e.k16.reshape(per_group)[..., None].astype(jnp.float32) / STEPS
    amax = e.amax.reshape(per_group)[..., None]
    image = jnp.abs(grouped) / fmt.max
    values = amax * jnp.exp2(jnp.log2(image) / k)
    return join_groups(jnp.copysign(values, grouped), e.codes.shape)


def exponent_sixteenths(
    amax: Float[Array, "..."], smallest: Float[Array, "..."], fit: Fit
) -> UInt8[Array, "..."]:
    """16 k per group, rounded down so that the smallest member still fits."""
    log2_spread = jnp.log2(smallest) - jnp.log2(jnp.maximum(amax, SMALLEST))
    steps = STEPS * fit.log2_range / jnp.maximum(-log2_spread, 1e-6)
    return jnp.clip(jnp.floor(steps + TOLERANCE), fit.min_steps, MAX_STEPS).astype(jnp.uint8)
