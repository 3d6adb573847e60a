"""Dynamic range expansion: FP8 for groups of numbers that are all of similar size.

    encode    q = fp8(F sign(x) (|x| / amax)^k)        F = 448, the largest E4M3
    decode    x = sign(q) amax (|q| / F)^(1/k)
    k         log(range of FP8) / log(amax / min|x|)   in sixteenths

The largest of a group of Adam moments is 1e1 to 1e3 times the smallest; E4M3 spans 2e5. Raised to
the power k, the group fills the format, and rounding errors shrink by a factor of k (equation 3 of
COAT, arXiv 2410.19313). Each group of 128 stores `amax` in FP32 and 16 k in one byte.

Laws, for finite input of any shape:
    zero stays zero;
    the largest of a group is exact, so a constant group is exact;
    no result is infinite or NaN;
    with noise, the decoded value is right on average. A value below the smallest code becomes
    that code or zero. If it always became that code, a moment could never decay to zero.
Denormal magnitudes (under 2^-126) count as zero, since XLA and the GPU flush them. NaN stays NaN
and leaves the rest of its group unchanged; infinity becomes the largest FP32.

There are three ways to round. Each has its own smallest k:

    nearest      k >= 1; k = 1 is plain scaled FP8. With a smaller k, one tiny element would
                 coarsen all others
    dithered     k >= 1; to nearest, but stochastically where codes are subnormal
    stochastic   k >= 1/2, and the smallest element is placed two binades above the smallest
                 code, so that rounding does not change it by more than a quarter
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float, UInt8

from coat_jax.numerics.formats import (
    E4M3,
    SMALLEST_NORMAL,
    dithered_cast,
    format_of,
    saturating_cast,
    stochastic_cast,
)
from coat_jax.numerics.groups import (
    group_max,
    join_groups,
    scales_shape,
    split_groups,
    to_groups,
)
from coat_jax.numerics.one_program import one_program

Rounding = Literal["nearest", "dithered", "stochastic"]

GROUP_SIZE = 128
STEPS = 16  # k is stored in sixteenths
MAX_STEPS = 255
HEADROOM = 2  # binades left below the smallest element with stochastic rounding
# Added before 16 k is rounded down. A group whose smallest element has the smallest code must get
# the same k when it is requantized, although the logarithms are rounded. Otherwise k, and with it
# the smallest element, would decrease a little at every step.
TOLERANCE = 1 / 64


class ExponentFit(NamedTuple):
    """How k is chosen."""

    log2_range: float  # the binades that a group is spread over
    min_steps: int  # the least 16 k
    tolerance: float = TOLERANCE


def fit_of(dtype: DTypeLike, rounding: Rounding) -> ExponentFit:
    """The choice of k for a format and a rounding; see above."""
    log2_range = format_of(dtype).log2_range
    if rounding == "stochastic":
        return ExponentFit(log2_range - HEADROOM, STEPS // 2)
    return ExponentFit(log2_range, STEPS)


def resolution(dtype: DTypeLike, rounding: Rounding) -> float:
    """The smallest magnitude that a group can hold if its largest is 1: its smallest code."""
    return 2.0 ** (-format_of(dtype).log2_range * STEPS / fit_of(dtype, rounding).min_steps)


class Expanded(NamedTuple):
    """An array in expanded FP8, or a tree of them: three trees of the same structure.

    `integers` and `logarithms` return it with codes of INT8 and UINT8. Of an array that is stored
    in FP32, `codes` are its values.
    """

    codes: Float[Array, "*rows D"]  # FP8, the array's shape
    amax: Float[Array, "*rows G"]  # FP32, the largest magnitude of each group
    exponent_x16: UInt8[Array, "*rows G"]  # 16 times the exponent of each group


@one_program("x", "noise", "never_zero")
def encode(
    x: Float[Array, "*rows D"],
    dtype: DTypeLike = E4M3,
    *,
    group_size: int = GROUP_SIZE,
    noise: Float[Array, "*rows D"] | None = None,
    dithered: bool = False,
    never_zero: Bool[ArrayLike, "*rows #G 1"] | bool = False,
) -> Expanded:
    """Rounds `x` to expanded FP8: to nearest, or with `noise` (uniform in [0, 1)) stochastically.

    Stochastic rounding is unbiased in x, not in (|x| / amax)^k.

    Args:
        x: finite floats of any shape.
        dtype: the FP8 format.
        group_size: neighbours along the last axis that share a scale and an exponent.
        noise: one number per element; see `coat_jax.numerics.noise.uniform`.
        dithered: rounds stochastically only where codes are subnormal. Use it for numbers that
            decay by at least a tenth per step: their larger codes decay even when rounded to
            nearest, and the smallest codes are right on average. The error is about half that of
            stochastic rounding. Between the smallest code and the next the mean of x is up to 1.4 %
            too small, since rounding is unbiased in (|x| / amax)^k; below the smallest code, where
            k = 1, the mean is exact.
        never_zero: whether non-zeros become at least the smallest code; for all groups, or one
            boolean for each. They are then too large on average. Use it for divisors.

    Example:
        >>> import coat_jax as coat, jax.numpy as jnp
        >>> e = coat.expansion.encode(jnp.array([1.0, 2.0, 4.0]))
        >>> print(e.codes.dtype.name, e.amax, e.exponent_x16 / 16)
        float8_e4m3fn [4.] [8.875]
        >>> print(jnp.round(coat.expansion.decode(e), 2))
        [1. 2. 4.]
    """
    values = to_groups(x, group_size)
    rounding: Rounding = "nearest"
    if noise is not None:
        rounding = "dithered" if dithered else "stochastic"
        noise = split_groups(noise, group_size)
    fmt = format_of(dtype)
    magnitude = jnp.abs(values)
    magnitude = jnp.where(magnitude < SMALLEST_NORMAL, 0.0, magnitude)
    amax = group_max(magnitude)
    smallest = jnp.min(jnp.where(magnitude > 0, magnitude, jnp.inf), axis=-1, initial=jnp.inf)
    smallest = jnp.where(amax > 0, smallest, 0.0)
    exponent_x16 = exponent_sixteenths(amax, smallest, fit_of(dtype, rounding))
    k = exponent_x16[..., None].astype(jnp.float32) / STEPS
    log2_ratio = jnp.log2(magnitude) - jnp.log2(jnp.maximum(amax, SMALLEST_NORMAL))[..., None]
    # Exactly zero for the largest: the difference of two rounded logarithms could round it down.
    largest = (magnitude >= amax[..., None]) & (magnitude > 0)
    image = fmt.max * jnp.exp2(k * jnp.where(largest, 0.0, log2_ratio))  # F (|x| / amax)^k
    nonzero = jnp.abs(values) >= SMALLEST_NORMAL
    image = jnp.where(never_zero & nonzero, jnp.maximum(image, fmt.tiny), image)
    image = jnp.copysign(image, values)
    if noise is None:
        codes = saturating_cast(image, dtype)
    elif dithered:
        codes = dithered_cast(image, dtype, noise)
    else:
        codes = stochastic_cast(image, dtype, noise, curvature=1 - 1 / k)
    return in_groups(codes, amax, exponent_x16, x.shape, group_size)


@one_program("e")
def decode(
    e: Expanded, *, group_size: int = GROUP_SIZE, dtype: DTypeLike | None = None
) -> Float[Array, "*rows D"]:
    """Returns the FP32 values of `e`; `dtype` is its format, if simulated."""
    fmt = format_of(e.codes.dtype if dtype is None else dtype)
    grouped = split_groups(e.codes, group_size).astype(jnp.float32)
    per_group = grouped.shape[:-1]
    k = e.exponent_x16.reshape(per_group)[..., None].astype(jnp.float32) / STEPS
    amax = e.amax.reshape(per_group)[..., None]
    image = jnp.abs(grouped) / fmt.max
    values = amax * jnp.exp2(jnp.log2(image) / k)
    return join_groups(jnp.copysign(values, grouped), e.codes.shape)


def in_groups(
    codes: Array, amax: Array, exponent_x16: Array, shape: tuple[int, ...], group_size: int
) -> Expanded:
    """The parts of an array of this shape, from groups."""
    scales = scales_shape(shape, group_size)
    return Expanded(join_groups(codes, shape), amax.reshape(scales), exponent_x16.reshape(scales))


def exponent_sixteenths(
    amax: Float[Array, "..."], smallest: Float[Array, "..."], fit: ExponentFit
) -> UInt8[Array, "..."]:
    """16 k per group, rounded down so that the smallest element still fits."""
    log2_spread = jnp.log2(smallest) - jnp.log2(jnp.maximum(amax, SMALLEST_NORMAL))
    steps = STEPS * fit.log2_range / jnp.maximum(-log2_spread, 1e-6)
    return jnp.clip(jnp.floor(steps + fit.tolerance), fit.min_steps, MAX_STEPS).astype(jnp.uint8)
