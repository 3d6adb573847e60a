"""Rounds an array to one FP8 tensor, straight or transposed, in one pass over memory.

    straight     codes[row, column] = fp8(x[row, column] / scale)
    transposed   codes[column, row]

It rounds to nearest, or stochastically with a stream of random bits: up or down, right on average.
The bits depend on an element's place alone, so results do not depend on the mesh.

Hopper multiplies FP8 only where both operands are contiguous along the axis that is summed over. A
weight or a gradient is summed over its columns in one product and over its rows in another, so it
is needed in both layouts. XLA's own transpose of FP8 is several times slower.

`cast_with_lengths` also returns the Euclidean length of each row of rounded values. The kernel
writes one sum of squares per row and 16 columns, or fewer where a mesh shards the columns finely.
"""

import itertools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax.kernels import dispatch
from coat_jax.kernels.launch import launch, tile_count
from coat_jax.kernels.sharding import as_3d, divides_cleanly, run_sharded
from coat_jax.numerics.formats import format_of, round_at_random, saturating_cast
from coat_jax.numerics.noise import NoiseStream, element_numbers, of_elements

Layout = Literal["straight", "transposed", "both"]
TILE_ROWS, TILE_COLUMNS, WARPS = 128, 64, 4
COLUMNS_PER_SUM = 16  # at most


def cast_reference(
    x: Float[Array, "*rows D"],
    scale: Float[Array, ""],
    dtype: DTypeLike,
    layout: Layout,
    *,
    stream: NoiseStream | None = None,
) -> tuple[Array | None, Array | None]:
    """The codes of x / scale, straight [*rows, D] and transposed [D, *rows]; None if not wanted."""
    y = x.astype(jnp.float32) * (1.0 / scale)
    if stream is not None:
        y = round_at_random(y, dtype, of_elements(y.shape, stream))
    codes = saturating_cast(y, dtype)
    straight = codes if layout != "transposed" else None
    return straight, jnp.moveaxis(codes, -1, 0) if layout != "straight" else None


def cast(
    x: Float[Array, "*rows D"],
    scale: Float[Array, ""],
    dtype: DTypeLike,
    layout: Layout,
    *,
    stream: NoiseStream | None = None,
) -> tuple[Array | None, Array | None]:
    """`cast_reference` as a kernel."""
    straight, transposed, _ = _cast(x, scale, dtype, layout, stream, with_sums=False)
    return straight, transposed


def lengths_reference(
    codes: Float[Array, "*rows D"], scale: Float[Array, ""]
) -> Float[Array, "*rows"]:
    """The Euclidean length of each row of codes * scale.

    The codes are squared before they are scaled, and so cannot overflow.
    """
    return jnp.sqrt(jnp.sum(jnp.square(codes.astype(jnp.float32)), axis=-1)) * scale


def cast_with_lengths(
    x: Float[Array, "*rows D"],
    scale: Float[Array, ""],
    dtype: DTypeLike,
    layout: Layout,
    *,
    stream: NoiseStream | None = None,
) -> tuple[Array | None, Array | None, Float[Array, "*rows"]]:
    """`cast`, and `lengths_reference` of the codes, in one pass."""
    straight, transposed, squares = _cast(x, scale, dtype, layout, stream, with_sums=True)
    assert squares is not None
    return straight, transposed, jnp.sqrt(jnp.sum(squares, axis=-1)) * scale


def _cast(
    x: Array,
    scale: Array,
    dtype: DTypeLike,
    layout: Layout,
    stream: NoiseStream | None,
    *,
    with_sums: bool,
) -> tuple[Array | None, Array | None, Array | None]:
    """The codes in the layouts that are wanted, and sums of their squares."""
    from coat_jax.kernels.triton.cast import ENTRIES

    *rows_shape, width = x.shape
    x = as_3d(x)
    results = {"straight": ["b s d"], "transposed": ["d b s"], "both": ["b s d", "d b s"]}[layout]
    per_sum = columns_per_sum(width) if with_sums else 0
    sums = [f"b s d/{per_sum}"] if with_sums else []

    numbers = element_numbers(x.shape, stream) if stream is not None else ()

    def run(x: Array, scale: Array, *numbers: Array) -> list[Array]:
        rows, columns = math.prod(x.shape[:-1]), x.shape[-1]
        shapes = {"b s d": x.shape, "d b s": (columns, *x.shape[:-1])}
        return launch(
            ENTRIES[layout == "both", with_sums],
            x,
            scale,
            *(numbers or (x, x)),
            outputs=[
                *(jax.ShapeDtypeStruct(shapes[axes], dtype) for axes in results),
                *(
                    jax.ShapeDtypeStruct((*x.shape[:-1], -(-columns // per_sum)), jnp.float32)
                    for _ in sums
                ),
            ],
            programs=tile_count(rows, columns, TILE_ROWS, TILE_COLUMNS),
            warps=WARPS,
            ROWS=rows,
            COLUMNS=columns,
            STRAIGHT=layout != "transposed",
            TRANSPOSED=layout != "straight",
            PER_SUM=per_sum,
            TILE_ROWS=TILE_ROWS,
            TILE_COLUMNS=TILE_COLUMNS,
            STOCHASTIC=stream is not None,
            F8=format_of(dtype),
            FAST=not dispatch.interpreting(),
        )

    operands = ["b s d", "", *["b s", "d"][: len(numbers)]]
    outputs = run_sharded(run, [x, scale, *numbers], operands, [*results, *sums])
    codes = outputs[: len(results)]
    straight = codes[0].reshape(*rows_shape, width) if layout != "transposed" else None
    transposed = codes[-1].reshape(width, *rows_shape) if layout != "straight" else None
    squares = outputs[-1].reshape(*rows_shape, outputs[-1].shape[-1]) if with_sums else None
    return straight, transposed, squares


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
