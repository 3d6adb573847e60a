"""FP8 codes of an array in one layout or both, and sums of their squares.

Every output is a parameter of the kernel, hence one entry point per combination of outputs.
"""

import triton
import triton.language as tl

from coat_jax.kernels.triton.formats import through_fp8
from coat_jax.kernels.triton.tiles import (
    block_offsets,
    load_tile,
    round_tile,
    store_tile,
    store_transposed,
    tile_indices,
)


@triton.jit
def cast_tile(
    x, scale, row_numbers, column_numbers, straight, transposed, squares,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRAIGHT: tl.constexpr, TRANSPOSED: tl.constexpr,
    PER_SUM: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    STOCHASTIC: tl.constexpr, F8: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """One tile; outputs that are not wanted are not written."""
    row, column = tile_indices(COLUMNS, TILE_ROWS, TILE_COLUMNS)
    y = load_tile(x, row, column, ROWS, COLUMNS) * (1.0 / tl.load(scale))
    y = round_tile(y, row_numbers, column_numbers, row, column, ROWS, COLUMNS, STOCHASTIC, F8, FAST)
    codes = y.to(straight.dtype.element_ty)
    if STRAIGHT:
        store_tile(codes, straight, row, column, ROWS, COLUMNS)
    if TRANSPOSED:
        store_transposed(codes, transposed, row, column, ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS)
    if PER_SUM:
        y = through_fp8(y, straight.dtype.element_ty, FAST)
        y = tl.reshape(y * y, [TILE_ROWS, TILE_COLUMNS // PER_SUM, PER_SUM])
        offsets, mask = block_offsets(row, ROWS, COLUMNS, TILE_COLUMNS, PER_SUM)
        tl.store(squares + offsets, tl.sum(y, axis=2), mask=mask)


@triton.jit
def cast_one(
    x, scale, row_numbers, column_numbers, out,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRAIGHT: tl.constexpr, TRANSPOSED: tl.constexpr,
    PER_SUM: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    STOCHASTIC: tl.constexpr, F8: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """One layout."""
    cast_tile(
        x, scale, row_numbers, column_numbers, out, out, out,
        ROWS, COLUMNS, STRAIGHT, TRANSPOSED, PER_SUM, TILE_ROWS, TILE_COLUMNS, STOCHASTIC, F8, FAST,
    )  # fmt: skip


@triton.jit
def cast_one_and_squares(
    x, scale, row_numbers, column_numbers, out, squares,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRAIGHT: tl.constexpr, TRANSPOSED: tl.constexpr,
    PER_SUM: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    STOCHASTIC: tl.constexpr, F8: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """One layout, and sums of squares."""
    cast_tile(
        x, scale, row_numbers, column_numbers, out, out, squares,
        ROWS, COLUMNS, STRAIGHT, TRANSPOSED, PER_SUM, TILE_ROWS, TILE_COLUMNS, STOCHASTIC, F8, FAST,
    )  # fmt: skip


@triton.jit
def cast_both(
    x, scale, row_numbers, column_numbers, straight, transposed,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRAIGHT: tl.constexpr, TRANSPOSED: tl.constexpr,
    PER_SUM: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    STOCHASTIC: tl.constexpr, F8: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Both layouts."""
    cast_tile(
        x, scale, row_numbers, column_numbers, straight, transposed, straight,
        ROWS, COLUMNS, STRAIGHT, TRANSPOSED, PER_SUM, TILE_ROWS, TILE_COLUMNS, STOCHASTIC, F8, FAST,
    )  # fmt: skip


@triton.jit
def cast_both_and_squares(
    x, scale, row_numbers, column_numbers, straight, transposed, squares,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRAIGHT: tl.constexpr, TRANSPOSED: tl.constexpr,
    PER_SUM: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    STOCHASTIC: tl.constexpr, F8: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Both layouts, and sums of squares."""
    cast_tile(
        x, scale, row_numbers, column_numbers, straight, transposed, squares,
        ROWS, COLUMNS, STRAIGHT, TRANSPOSED, PER_SUM, TILE_ROWS, TILE_COLUMNS, STOCHASTIC, F8, FAST,
    )  # fmt: skip


# (both layouts, sums of squares) -> entry point
ENTRIES = {
    (False, False): cast_one,
    (False, True): cast_one_and_squares,
    (True, False): cast_both,
    (True, True): cast_both_and_squares,
}
