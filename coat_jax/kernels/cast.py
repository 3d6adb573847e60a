"""Rounds an array to one FP8 tensor, straight or transposed, in one pass over memory.

    straight     codes[row, column] = fp8(x[row, column] / scale)
    transposed   codes[column, row]

It rounds to nearest, or stochastically with a stream of random bits: up or down, right on average.
The bits depend on an element's place alone, so results do not depend on the mesh.

Hopper multiplies FP8 only where both operands are contiguous along the axis that is summed over. A
weight or a gradient is summed over its columns in one product and over its rows in another, so it
is needed in both layouts. XLA's own transpose of FP8 is several times slower.

It can also return the Euclidean length of each row of rounded values. The kernel then writes one
sum of squares per row and 16 columns, or fewer where a mesh shards the columns finely.
"""

import itertools
import math
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax.kernels.launch import Tile, divide
from coat_jax.kernels.sharding import as_3d, divides_cleanly, launch_sharded
from coat_jax.numerics.formats import format_of
from coat_jax.numerics.noise import NoiseStream, element_numbers

Layout = Literal["straight", "transposed", "both"]
TILE = Tile(128, 64, 4)
COLUMNS_PER_SUM = 16  # at most


class Cast(NamedTuple):
    """The constants of the kernel."""

    straight: bool
    transposed: bool
    per_sum: int  # columns of a sum of squares; 0 without sums
    stochastic: bool


def cast(
    x: Float[Array, "*rows D"],
    scale: Float[Array, ""],
    dtype: DTypeLike,
    layout: Layout,
    *,
    stream: NoiseStream | None = None,
    lengths: bool = False,
) -> tuple[Array | None, Array | None, Array | None]:
    """The codes of `gemm.operand`, [*rows, D] and [D, *rows], and lengths; None if not wanted."""
    from coat_jax.kernels.triton.cast import ENTRIES

    *rows_shape, width = x.shape
    x = as_3d(x)
    straight, transposed = layout != "transposed", layout != "straight"
    per_sum = columns_per_sum(width) if lengths else 0
    outputs = [("b s d", dtype)] * straight + [("d b s", dtype)] * transposed
    rows, columns = (None, None) if stream is None else element_numbers(x.shape, stream)
    results = launch_sharded(
        ENTRIES[layout == "both", lengths],
        [(x, "b s d"), (scale, ""), (rows, "b s"), (columns, "d")],
        outputs + [(f"b s d/{per_sum}", jnp.float32)] * lengths,
        partial(divide, tile=TILE),
        CAST=Cast(straight, transposed, per_sum, stream is not None),
        F8=format_of(dtype),
    )
    of_rows = None
    if lengths:
        squares = results[-1].reshape(*rows_shape, results[-1].shape[-1])
        of_rows = jnp.sqrt(jnp.sum(squares, axis=-1)) * scale
    return (
        results[0].reshape(*rows_shape, width) if straight else None,
        results[straight].reshape(width, *rows_shape) if transposed else None,
        of_rows,
    )


def columns_per_sum(columns: int) -> int:
    """How many columns each sum of squares is over, so that sums are sharded where columns are."""
    mesh = jax.sharding.get_abstract_mesh()
    sizes = tuple(mesh.shape.values())
    uses = itertools.product((False, True), repeat=len(sizes))
    parts = {math.prod(itertools.compress(sizes, used)) for used in uses} - {1}

    def fits(per_sum: int) -> bool:
        if any(columns % n == 0 and columns % (n * per_sum) for n in parts):
            return False
        return columns % per_sum != 0 or divides_cleanly(mesh, columns // per_sum)

    per_sum = COLUMNS_PER_SUM
    while per_sum > 1 and not fits(per_sum):
        per_sum //= 2
    return per_sum
