"""FP8 in blocks: how activations are saved for the backward pass.

    x ~ codes * 2^(exponent - 127),    one exponent per block of neighbours on the last axis

The exponent is the smallest with which the block's largest element still fits the format. It
takes one byte: with blocks of 16, x takes 1.06 bytes per element. The largest code of E4M3 is
2^14.8 times the smallest normal one, and rounding the scale up costs at most one of these binades.
An exact scale, of two to four bytes, would represent the largest element exactly and round only
the others. That would reduce the error by a sixth in blocks of 16, and hardly at all in long
blocks (docs/rounding_errors.md).

Values are rounded to nearest, or stochastically: up or down at random, right on average. Rounding
to nearest loses differences that are smaller than the distance of two codes. Early in training,
when all tokens have nearly the same activations, those differences are what there is to learn.
The random numbers depend only on an element's place, so results do not depend on the mesh.

Zero stays zero. Exponent 255 marks a block with a NaN or an infinity, and none of its values is
finite. (On CPUs, XLA's maximum may lose a NaN; then only the NaN itself is not finite.) A short
last block is allowed. FP32 denormals count as zero; values that round up to 2^128 become infinite,
as in a cast to BF16.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, UInt8, UInt32

from coat_jax.numerics.formats import E4M3, codes_dtype, format_of, nearest, round_at_random
from coat_jax.numerics.groups import join_groups, scales_shape, split_groups, to_groups
from coat_jax.numerics.noise import of_places, run_numbers
from coat_jax.numerics.one_program import one_program

NOT_FINITE = 255


class BlockNumbers(NamedTuple):
    """The place of each block in an array, row-major: `first[..., None] + within`."""

    first: UInt32[Array, "*rows"]  # the place of the first block of each row
    within: UInt32[Array, " N"]  # the place of a block in its row


class Blocks(NamedTuple):
    """An array in FP8: `codes` has its shape, `exponents` one number per block."""

    codes: Float[Array, "*rows D"]
    exponents: UInt8[Array, "*rows N"]


@one_program("x")
def to_blocks(
    x: Float[Array, "*rows D"],
    dtype: DTypeLike = E4M3,
    *,
    size: int,
    stochastic: bool = False,
    antithetic: bool = False,
) -> Blocks:
    """Rounds `x` to FP8, with one exponent per `size` neighbours.

    Args:
        x: what to round.
        dtype: the FP8 format.
        size: of a block.
        stochastic: rounds up or down at random, right on average, instead of to nearest.
        antithetic: takes the complements of the random bits. Use it for one of two arrays that are
            multiplied: where one is rounded up, the other is rather rounded down, and much of the
            error of their product cancels. With the same bits the errors would add up.
    """
    grouped = to_groups(x, size)
    # XLA's maximum propagates NaN, except on CPUs, where it may lose one.
    exponents = fitting_exponent(jnp.max(jnp.abs(grouped), axis=-1, initial=0.0), dtype)
    # Rounded before the cast, so that `from_blocks` in the same program gives rounded values.
    inverse = power_of_two(np.int32(254) - jnp.minimum(exponents, 253))
    codes = grouped * jnp.where(exponents == NOT_FINITE, jnp.nan, inverse)[..., None]
    if stochastic:
        bits = of_places(run_numbers(exponents.shape), grouped.shape[-1])
        codes = round_at_random(codes, dtype, ~bits if antithetic else bits)
    else:
        codes = nearest(codes, dtype)
    codes = join_groups(codes.astype(codes_dtype(dtype)), x.shape)
    return Blocks(codes, exponents.astype(jnp.uint8).reshape(scales_shape(x.shape, size)))


def block_numbers(shape: tuple[int, ...], size: int) -> BlockNumbers:
    """The numbers of an array's blocks, for kernels, each of which sees only a shard of it."""
    *rows, columns = shape
    count = -(-columns // size)
    first = run_numbers(tuple(rows)) * np.uint32(count % 2**32)
    return BlockNumbers(first, jnp.arange(count, dtype=jnp.uint32))


@one_program("blocks")
def from_blocks(blocks: Blocks, *, size: int) -> Float[Array, "*rows D"]:
    """The FP32 values that `blocks` stands for."""
    grouped = split_groups(blocks.codes, size).astype(jnp.float32)
    scale = power_of_two(blocks.exponents.reshape(grouped.shape[:-1]))
    return join_groups(grouped * scale[..., None], blocks.codes.shape)


def fitting_exponent(amax: Float[Array, "..."], dtype: DTypeLike) -> Int32[Array, "..."]:
    """The least e >= 1 with amax <= 2^(e - 127) * the largest code; 255 if amax is not finite."""
    # The largest codes of E4M3 and E5M2 are 1.75 times a power of two: adding the difference of 2
    # and 1.75 carries into the exponent of FP32 exactly where the mantissa is above 1.75.
    fmt = format_of(dtype)
    missing = int((2 - fmt.max / 2.0**fmt.top_exponent) * 2**23) - 1
    bits = jax.lax.bitcast_convert_type(amax, jnp.int32) + np.int32(missing)
    exponent = jnp.maximum((bits >> 23) - np.int32(fmt.top_exponent), 1)
    return jnp.where(jnp.isfinite(amax), exponent, NOT_FINITE)


def power_of_two(exponent: Int32[Array, "..."] | UInt8[Array, "..."]) -> Float[Array, "..."]:
    """2^(exponent - 127) in FP32, of an exponent in 1 .. 254; 255 gives infinity."""
    return jax.lax.bitcast_convert_type(exponent.astype(jnp.int32) << 23, jnp.float32)
