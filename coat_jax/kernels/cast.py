"""Rounds an array to one FP8 tensor, straight or transposed, in one pass over memory.

    straight     codes[row, column] = fp8(x[row, column] / scale)
    transposed   codes[column, row]

Hopper multiplies FP8 only where both operands are contiguous along the axis that is summed
over. A weight or a gradient is summed over its columns in one product and over its rows in
another, so it is needed in both layouts; XLA's own transpose of FP8 is several times slower.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax.formats import format_of, saturating_cast
from coat_jax.kernels import dispatch
from coat_jax.kernels.fp8 import rounded
from coat_jax.kernels.launch import kernel, launch
from coat_jax.kernels.rows import as_rows, over_rows
from coat_jax.kernels.tiles import load_tile, store_straight, store_transposed, tile_of, tiles

if TYPE_CHECKING:
    import triton.language as tl

Layout = Literal["straight", "transposed", "both"]
TILE_ROWS, TILE_COLUMNS, WARPS = 128, 64, 4


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
    *rows_shape, width = x.shape
    x = as_rows(x)
    results = {"straight": ["b s d"], "transposed": ["d b s"], "both": ["b s d", "d b s"]}[layout]

    def run(x: Array, scale: Array) -> list[Array]:
        rows, columns = math.prod(x.shape[:-1]), x.shape[-1]
        shapes = {"b s d": x.shape, "d b s": (columns, *x.shape[:-1])}
        return launch(
            cast_both if layout == "both" else cast_one,
            x,
            scale,
            outputs=[jax.ShapeDtypeStruct(shapes[axes], dtype) for axes in results],
            aliases={},
            programs=tiles(rows, columns, TILE_ROWS, TILE_COLUMNS),
            warps=WARPS,
            ROWS=rows,
            COLUMNS=columns,
            STRAIGHT=layout != "transposed",
            TRANSPOSED=layout != "straight",
            TILE_ROWS=TILE_ROWS,
            TILE_COLUMNS=TILE_COLUMNS,
            F8=rounding_of(dtype),
            FAST=not dispatch.interpreting(),
        )

    outputs = over_rows(run, [x, scale], ["b s d", ""], results)
    straight = outputs[0].reshape(*rows_shape, width) if layout != "transposed" else None
    return straight, outputs[-1].reshape(width, *rows_shape) if layout != "straight" else None


def rounding_of(dtype: DTypeLike) -> tuple[float, int, int]:
    """What a kernel needs to round to an FP8 format where the hardware does not."""
    fmt = format_of(dtype)
    return fmt.max, fmt.min_exponent, fmt.mantissa_bits


@kernel
def cast_tile(
    x,
    scale,
    straight,
    transposed,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STRAIGHT: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    F8: tl.constexpr,
    FAST: tl.constexpr,
):
    row, column = tile_of(COLUMNS, TILE_ROWS, TILE_COLUMNS)
    y = load_tile(x, row, column, ROWS, COLUMNS) * (1.0 / tl.load(scale))
    codes = rounded(y, F8[0], F8[1], F8[2], FAST).to(straight.dtype.element_ty)
    if STRAIGHT:
        store_straight(codes, straight, row, column, ROWS, COLUMNS)
    if TRANSPOSED:
        store_transposed(codes, transposed, row, column, ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS)


@kernel
def cast_one(
    x, scale, out,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRAIGHT: tl.constexpr, TRANSPOSED: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, F8: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """One layout."""
    cast_tile(
        x, scale, out, out,
        ROWS, COLUMNS, STRAIGHT, TRANSPOSED, TILE_ROWS, TILE_COLUMNS, F8, FAST,
    )  # fmt: skip


@kernel
def cast_both(
    x, scale, straight, transposed,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRAIGHT: tl.constexpr, TRANSPOSED: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, F8: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Both layouts."""
    cast_tile(
        x, scale, straight, transposed,
        ROWS, COLUMNS, STRAIGHT, TRANSPOSED, TILE_ROWS, TILE_COLUMNS, F8, FAST,
    )  # fmt: skip
