"""What rounding to FP8 does to a tensor: a few sums, and `Statistics` that follow from them.

Sums of the parts of a tensor, of microbatches, of shards or of layers add up to the sums of the
whole, in which each part's errors are relative to its own scale. They can therefore be added as
gradients are, which is how `telemetry` collects them.
FP32 magnitudes under 2^-126 count as zero.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from coat_jax.numerics import eight_bits
from coat_jax.numerics.blocks import Blocks, from_blocks, power_of_two
from coat_jax.numerics.formats import format_of, saturating_cast
from coat_jax.numerics.groups import split_groups


class Sums(NamedTuple):
    """One FP32 number each, in the order in which `stack` puts them."""

    size: Float[Array, ""]  # elements; 0 if no tensor was recorded
    nonzero: Float[Array, ""]  # elements, as are the next three
    underflow: Float[Array, ""]
    subnormal: Float[Array, ""]
    saturated: Float[Array, ""]
    scales: Float[Array, ""]  # those of tensors or blocks that are not zero
    headroom: Float[Array, ""]  # summed over scales
    squares: Float[Array, ""]  # of the values, in units of the scale (the largest, for blocks)
    squared_errors: Float[Array, ""]  # likewise


NUMBERS = len(Sums._fields)


class Statistics(NamedTuple):
    """What rounding to FP8 does to a tensor.

    Attributes:
        underflow: the share of the non-zero values whose code is zero.
        subnormal: the share of the non-zero values whose code is subnormal, with fewer bits.
        saturated: the share of the non-zero values beyond the largest code.
        headroom: log2 of the largest value that the scale allows over the largest value of the
            tensor; for blocks the mean over blocks. NaN for a tensor of zeros.
        error: root mean square of (decoded - value), relative to that of the values; with INT8, as
            `of_int8` weights them. 0 for a tensor of zeros. NaN for a tensor with a NaN or an
            infinity, and for one whose scale is so large that all codes and all squares become
            zero.
    """

    underflow: float
    subnormal: float
    saturated: float
    headroom: float
    error: float


def of_tensor(
    x: Float[Array, "*rows D"], scale: Float[Array, ""], dtype: DTypeLike
) -> Float[Array, "9"]:
    """The sums of a tensor that is rounded to FP8 with one scale."""
    x = jnp.atleast_1d(x).astype(jnp.float32)
    codes = saturating_cast(x * (1.0 / scale), dtype).astype(jnp.float32)
    limit = format_of(dtype).max * scale
    amax = jnp.max(jnp.abs(x), initial=0.0)
    return _stacked(x, codes, codes * scale, jnp.abs(x) > limit, limit, amax, scale, dtype)


def of_int8(x: Float[Array, "*rows D"], weights: Float[Array, " D"]) -> Float[Array, "9"]:
    """The sums of a tensor whose rows are rounded to INT8, which has no subnormal codes.

    Columns count with their `weights`. If these are the squares of the factors that multiply the
    columns, the error is that of the product: it is large where a few large columns, which have
    small factors, leave few codes to the others.
    """
    x = jnp.atleast_1d(x).astype(jnp.float32)
    amax = jnp.max(jnp.abs(x), axis=-1, keepdims=True, initial=0.0)
    scale = eight_bits.scale_of(amax, "int8")
    codes = eight_bits.encode(x, scale, "int8").astype(jnp.float32)
    unit = jnp.max(scale, initial=0.0)
    # Where a row is not finite, neither are its scale and its sums.
    beyond = jnp.abs(x) > jnp.inf
    return _stacked(x, codes, codes * scale, beyond, amax, amax, unit, jnp.int8, weights)


def column_squares(*tensors: Float[Array, "*rows D"]) -> Float[Array, " D"]:
    """The sum of squares of each column of all tensors, in units of the largest element's square.

    All are 1 if the tensors are zero, or not finite.
    """
    parts = [jnp.abs(jnp.atleast_1d(x).astype(jnp.float32)) for x in tensors]
    largest = jnp.max(jnp.stack([jnp.max(part, initial=0.0) for part in parts]))
    usable = (largest > 0) & jnp.isfinite(largest)
    unit = jnp.where(usable, largest, 1.0)
    sums = [jnp.sum(jnp.square(part / unit).reshape(-1, part.shape[-1]), axis=0) for part in parts]
    return jnp.where(usable, sum(sums), 1.0)


def of_blocks(
    x: Float[Array, "*rows D"], blocks: Blocks, *, size: int, dtype: DTypeLike | None = None
) -> Float[Array, "9"]:
    """The sums of a tensor that is stored in blocks; `dtype` is their format, if simulated."""
    x = jnp.atleast_1d(x).astype(jnp.float32)
    dtype = blocks.codes.dtype if dtype is None else dtype
    amax = jnp.max(jnp.abs(split_groups(x, size)), axis=-1, initial=0.0)
    scales = power_of_two(blocks.exponents).reshape(amax.shape)
    limit = format_of(dtype).max * scales
    beyond = jnp.abs(split_groups(x, size)) > limit[..., None]
    codes = blocks.codes.astype(jnp.float32).reshape(x.shape)
    decoded = from_blocks(blocks, size=size).reshape(x.shape)
    unit = jnp.max(scales, initial=0.0)
    return _stacked(x, codes, decoded, beyond, limit, amax, unit, dtype)


def of_sums(sums: Float[np.ndarray, "9"]) -> Statistics:
    """The statistics, on the host."""
    of = dict(zip(Sums._fields, map(float, sums), strict=True))
    nonzero = of["nonzero"] or 1.0
    return Statistics(
        underflow=of["underflow"] / nonzero,
        subnormal=of["subnormal"] / nonzero,
        saturated=of["saturated"] / nonzero,
        headroom=of["headroom"] / of["scales"] if of["scales"] else math.nan,
        error=_root(of["squared_errors"], of["squares"]) if of["nonzero"] else 0.0,
    )


def _root(part: float, whole: float) -> float:
    return math.sqrt(part / whole) if whole else math.nan


def _stacked(
    x: Float[Array, "*rows D"],
    codes: Float[Array, "*rows D"],
    decoded: Float[Array, "*rows D"],
    beyond: Bool[Array, "..."],
    limit: Float[Array, "..."],
    amax: Float[Array, "..."],
    unit: Float[Array, ""],
    dtype: DTypeLike,
    weights: Float[Array, " D"] | float = 1.0,
) -> Float[Array, "9"]:
    """`Sums` as one array, from codes in FP32 and from the limits and maxima of all scales.

    All sums take one pass over the tensor, because none depends on another.
    """
    nonzero = x != 0
    smallest_normal = 0.0 if dtype == jnp.int8 else 2.0 ** format_of(dtype).min_exponent
    used = ~(amax == 0)  # also where it is NaN, which makes the sums NaN
    binades = jnp.log2(jnp.where(used, limit, 1.0)) - jnp.log2(jnp.where(used, amax, 1.0))
    sums = Sums(
        size=jnp.float32(x.size),
        nonzero=_count(nonzero),
        underflow=_count(nonzero & (codes == 0)),
        subnormal=_count((codes != 0) & (jnp.abs(codes) < smallest_normal)),
        saturated=_count(beyond),
        scales=_count(jnp.atleast_1d(used)),
        headroom=jnp.sum(binades),
        # Squares of gradients would underflow. A power of two divides exactly.
        squares=jnp.sum(weights * jnp.square(x / unit)),
        squared_errors=jnp.sum(weights * jnp.square((decoded - x) / unit)),
    )
    return jnp.stack(sums)


def _count(true: Bool[Array, "*rows D"]) -> Float[Array, ""]:
    """How many are true, in FP32: a sharded tensor may have more elements than int32 can count."""
    return jnp.sum(jnp.sum(true, axis=-1, dtype=jnp.int32).astype(jnp.float32))
