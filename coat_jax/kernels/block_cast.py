"""Rounds an array to FP8 blocks in one pass over memory: `numerics.blocks.to_blocks` as a kernel.

XLA makes two passes: one for the largest element of each block, and one for the codes.
"""

from functools import partial

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax.kernels.dispatch import Implementation
from coat_jax.kernels.launch import Tile, divide
from coat_jax.kernels.sharding import as_3d, launch_sharded
from coat_jax.numerics.blocks import Blocks, block_numbers, to_blocks
from coat_jax.numerics.formats import format_of

TILE = Tile(32, 128, 4)


def block_cast(
    x: Float[Array, "*rows D"],
    dtype: DTypeLike,
    size: int,
    *,
    stochastic: bool = False,
    antithetic: bool = False,
    implementation: Implementation,
) -> Blocks:
    """The blocks of `x`; see `to_blocks`."""
    if implementation == "xla":
        return to_blocks(x, dtype, size=size, stochastic=stochastic, antithetic=antithetic)
    from coat_jax.kernels.triton.cast import block_cast_tile

    rows = as_3d(x)
    first, within = block_numbers(rows.shape, size) if stochastic else (None, None)
    codes, exponents = launch_sharded(
        block_cast_tile,
        [(rows, "b s d"), (first, "b s"), (within, f"d/{size}")],
        [("b s d", dtype), (f"b s d/{size}", jnp.uint8)],
        partial(divide, tile=TILE, block=size),
        STOCHASTIC=stochastic,
        ANTITHETIC=antithetic,
        F8=format_of(dtype),
    )
    return Blocks(codes.reshape(x.shape), exponents.reshape(*x.shape[:-1], -1))
