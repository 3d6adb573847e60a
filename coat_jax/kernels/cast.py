"""Rounds an array to one FP8 tensor, straight or transposed, in one pass over memory.

    straight     codes[row, column] = fp8(x[row, column] / scale)
    transposed   codes[column, row]

Hopper multiplies FP8 only where both operands are contiguous along the axis that is summed
over. A weight or a gradient is summed over its columns in one product and over its rows in
another, so it is needed in both layouts; XLA's own transpose of FP8 is several times slower.

`cast_with_lengths` also gives the Euclidean length of each row, of the values as they are rounded:
the kernel writes one sum of squares per row and 16 columns, or fewer where a mesh cuts the columns
finely.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax.kernels import dispatch
from coat_jax.kernels.fp8 import rounded, through_fp8
from coat_jax.kernels.launch import kernel, launch
from coat_jax.kernels.partition import divides_cleanly
from coat_jax.kernels.rows import as_rows, over_rows
from coat_jax.kernels.tiles import (
    block_places,
    load_tile,
    store_straight,
    store_transposed,
    tile_of,
    tiles,
)
from coat_jax.numerics.formats import format_of, saturating_cast

if TYPE_CHECKING:
    import triton.language as tl

Layout = Literal["straight", "transposed", "both"]
TILE_ROWS, TILE_COLUMNS, WARPS = 128, 64, 4
COLUMNS_PER_SUM = 16  # at most


def cast_reference(
    x: Float[Array, "*rows D"], scale: Float[Array, ""], dtype: DTypeLike, layout: Layout
) -> tuple[Array | None, Array | None]:
    """The codes of x / scale, straight [*rows, D] and transposed [D, *rows]; None if not asked."""
    codes = saturating_cast(x.astype(jnp.float32) * (1.0 / scale), dtype)
    straight = codes if layout != "transposed" else None
    return straight, jnp.moveaxis(codes, -1, 0) if layout != "straight" else None


def cast(
    x: Float[Array, "*rows D"], scale: Float[Array, ""], dtype: DTypeLike, layout: Layout
) -> tuple[Array | None, Array | None]:
    """`cast_reference` as a kernel."""
    straight, transposed, _ = _cast(x, scale, dtype, layout, measured=False)
    return straight, transposed


def lengths_reference(
    codes: Float[Array, "*rows D"], scale: Float[Array, ""]
) -> Float[Array, "*rows"]:
    """The Euclidean length of each row of codes * scale. The codes are squared before: they fit."""
    return jnp.sqrt(jnp.sum(jnp.square(codes.astype(jnp.float32)), axis=-1)) * scale


def cast_with_lengths(
    x: Float[Array, "*rows D"], scale: Float[Array, ""], dtype: DTypeLike, layout: Layout
) -> tuple[Array | None, Array | None, Float[Array, "*rows"]]:
    """`cast`, and `lengths_reference` of the codes, in one pass."""
    straight, transposed, squares = _cast(x, scale, dtype, layout, measured=True)
    assert squares is not None
    return straight, transposed, jnp.sqrt(jnp.sum(squares, axis=-1)) * scale


def _cast(
    x: Array, scale: Array, dtype: DTypeLike, layout: Layout, *, measured: bool
) -> tuple[Array | None, Array | None, Array | None]:
    """The codes in both layouts, and sums of their squares."""
    *rows_shape, width = x.shape
    x = as_rows(x)
    results = {"straight": ["b s d"], "transposed": ["d b s"], "both": ["b s d", "d b s"]}[layout]
    per_sum = columns_per_sum(width) if measured else 0
    sums = [f"b s d/{per_sum}"] if measured else []

    def run(x: Array, scale: Array) -> list[Array]:
        rows, columns = math.prod(x.shape[:-1]), x.shape[-1]
        shapes = {"b s d": x.shape, "d b s": (columns, *x.shape[:-1])}
        return launch(
            ENTRIES[layout == "both", measured],
            x,
            scale,
            outputs=[
                *(jax.ShapeDtypeStruct(shapes[axes], dtype) for axes in results),
                *(
                    jax.ShapeDtypeStruct((*x.shape[:-1], -(-columns // per_sum)), jnp.float32)
                    for _ in sums
                ),
            ],
            aliases={},
            programs=tiles(rows, columns, TILE_ROWS, TILE_COLUMNS),
            warps=WARPS,
            ROWS=rows,
            COLUMNS=columns,
            STRAIGHT=layout != "transposed",
            TRANSPOSED=layout != "straight",
            PER_SUM=per_sum,
            TILE_ROWS=TILE_ROWS,
            TILE_COLUMNS=TILE_COLUMNS,
            F8=rounding_of(dtype),
            FAST=not dispatch.interpreting(),
        )

    outputs = over_rows(run, [x, scale], ["b s d", ""], [*results, *sums])
    codes = outputs[: len(results)]
    straight = codes[0].reshape(*rows_shape, width) if layout != "transposed" else None
    transposed = codes[-1].reshape(width, *rows_shape) if layout != "straight" else None
    return straight, transposed, outputs[-1].reshape(*rows_shape, -1) if measured else None


def columns_per_sum(columns: int) -> int:
    """How many columns a sum of squares is over: the mesh can cut sums wherever it cuts columns."""
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


def rounding_of(dtype: DTypeLike) -> tuple[float, int, int]:
    """What a kernel needs to round to an FP8 format where the hardware does not."""
    fmt = format_of(dtype)
    return fmt.max, fmt.min_exponent, fmt.mantissa_bits


# --- Kernels ---------------------------------------------------------------------------------


@kernel
def cast_tile(
    x, scale, straight, transposed, squares,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRAIGHT: tl.constexpr, TRANSPOSED: tl.constexpr,
    PER_SUM: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, F8: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    row, column = tile_of(COLUMNS, TILE_ROWS, TILE_COLUMNS)
    y = load_tile(x, row, column, ROWS, COLUMNS) * (1.0 / tl.load(scale))
    y = rounded(y, F8[0], F8[1], F8[2], FAST)
    codes = y.to(straight.dtype.element_ty)
    if STRAIGHT:
        store_straight(codes, straight, row, column, ROWS, COLUMNS)
    if TRANSPOSED:
        store_transposed(codes, transposed, row, column, ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS)
    if PER_SUM:
        y = through_fp8(y, straight.dtype.element_ty, FAST)
        y = tl.reshape(y * y, [TILE_ROWS, TILE_COLUMNS // PER_SUM, PER_SUM])
        at, there = block_places(row, ROWS, COLUMNS, TILE_COLUMNS, PER_SUM)
        tl.store(squares + at, tl.sum(y, axis=2), mask=there)


@kernel
def cast_one(
    x, scale, out,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRAIGHT: tl.constexpr, TRANSPOSED: tl.constexpr,
    PER_SUM: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, F8: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """One layout."""
    cast_tile(
        x, scale, out, out, out,
        ROWS, COLUMNS, STRAIGHT, TRANSPOSED, PER_SUM, TILE_ROWS, TILE_COLUMNS, F8, FAST,
    )  # fmt: skip


@kernel
def cast_one_measured(
    x, scale, out, squares,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRAIGHT: tl.constexpr, TRANSPOSED: tl.constexpr,
    PER_SUM: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, F8: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """One layout, and sums of squares."""
    cast_tile(
        x, scale, out, out, squares,
        ROWS, COLUMNS, STRAIGHT, TRANSPOSED, PER_SUM, TILE_ROWS, TILE_COLUMNS, F8, FAST,
    )  # fmt: skip


@kernel
def cast_both(
    x, scale, straight, transposed,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRAIGHT: tl.constexpr, TRANSPOSED: tl.constexpr,
    PER_SUM: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, F8: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Both layouts."""
    cast_tile(
        x, scale, straight, transposed, straight,
        ROWS, COLUMNS, STRAIGHT, TRANSPOSED, PER_SUM, TILE_ROWS, TILE_COLUMNS, F8, FAST,
    )  # fmt: skip


@kernel
def cast_both_measured(
    x, scale, straight, transposed, squares,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRAIGHT: tl.constexpr, TRANSPOSED: tl.constexpr,
    PER_SUM: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, F8: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Both layouts, and sums of squares."""
    cast_tile(
        x, scale, straight, transposed, squares,
        ROWS, COLUMNS, STRAIGHT, TRANSPOSED, PER_SUM, TILE_ROWS, TILE_COLUMNS, F8, FAST,
    )  # fmt: skip


# By whether both layouts are wanted, and sums of squares.
ENTRIES = {
    (False, False): cast_one,
    (False, True): cast_one_measured,
    (True, False): cast_both,
    (True, True): cast_both_measured,
}
