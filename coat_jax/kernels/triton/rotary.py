"""The gradient of rotary embeddings, rounded to FP8 in both layouts."""

import triton
import triton.language as tl

from coat_jax.kernels.triton.tiles import (
    first_column,
    load_tile,
    round_tile,
    store_tile,
    store_transposed,
    tile_indices,
)


@triton.jit
def rotary_backward_cast_heads(
    dy, cos, sin, scale, row_numbers, column_numbers, straight, transposed,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TABLE_ROWS: tl.constexpr, HALF: tl.constexpr,
    HEADS: tl.constexpr, TILE_ROWS: tl.constexpr, STOCHASTIC: tl.constexpr, F8: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """HEADS heads of TILE_ROWS rows."""
    WIDTH: tl.constexpr = 2 * HALF * HEADS
    row, _ = tile_indices(COLUMNS, TILE_ROWS, WIDTH)
    pair = tl.arange(0, HALF)
    c = load_tile(cos, row % TABLE_ROWS, pair, TABLE_ROWS, HALF)
    s = load_tile(sin, row % TABLE_ROWS, pair, TABLE_ROWS, HALF)
    inverse = 1.0 / tl.load(scale)
    first = first_column(COLUMNS, WIDTH)
    for head in tl.static_range(HEADS):
        left = first + 2 * HALF * head + pair
        a = load_tile(dy, row, left, ROWS, COLUMNS)
        b = load_tile(dy, row, left + HALF, ROWS, COLUMNS)
        store_rotated(
            (a * c + b * s) * inverse, row_numbers, column_numbers, straight, transposed, row, left,
            ROWS, COLUMNS, TILE_ROWS, WIDTH, STOCHASTIC, F8, FAST,
        )  # fmt: skip
        store_rotated(
            (b * c - a * s) * inverse, row_numbers, column_numbers, straight, transposed, row,
            left + HALF, ROWS, COLUMNS, TILE_ROWS, WIDTH, STOCHASTIC, F8, FAST,
        )  # fmt: skip


@triton.jit
def store_rotated(
    v, row_numbers, column_numbers, straight, transposed, row, column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, WIDTH: tl.constexpr,
    STOCHASTIC: tl.constexpr, F8: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Stores half a head of each row, in both layouts."""
    v = round_tile(v, row_numbers, column_numbers, row, column, ROWS, COLUMNS, STOCHASTIC, F8, FAST)
    codes = v.to(straight.dtype.element_ty)
    store_tile(codes, straight, row, column, ROWS, COLUMNS)
    store_transposed(codes, transposed, row, column, ROWS, COLUMNS, TILE_ROWS, WIDTH)
