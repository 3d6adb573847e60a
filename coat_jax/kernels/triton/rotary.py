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
    STOCHASTIC: tl.constexpr, F8: tl.constexpr, ANGLES: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The heads of a tile, whose blocks they are. ANGLES are the `Tiles` of cos and sin."""
    HEADS: tl.constexpr = TILES.width // TILES.block
    row, _ = tile_indices(TILES)
    pair = tl.arange(0, ANGLES.columns)
    c = load_tile(cos, row % ANGLES.rows, pair, ANGLES)
    s = load_tile(sin, row % ANGLES.rows, pair, ANGLES)
    inverse = 1.0 / tl.load(scale)
    first = first_column(TILES)
    for head in tl.static_range(HEADS):
        left = first + TILES.block * head + pair
        a = load_tile(dy, row, left, TILES)
        b = load_tile(dy, row, left + ANGLES.columns, TILES)
        store_rotated(
            (a * c + b * s) * inverse, row_numbers, column_numbers, straight, transposed, row, left,
            STOCHASTIC, F8, TILES,
        )  # fmt: skip
        store_rotated(
            (b * c - a * s) * inverse, row_numbers, column_numbers, straight, transposed, row,
            left + ANGLES.columns, STOCHASTIC, F8, TILES,
        )  # fmt: skip


@triton.jit
def store_rotated(
    v, row_numbers, column_numbers, straight, transposed, row, column,
    STOCHASTIC: tl.constexpr, F8: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Stores half a head of each row, in both layouts."""
    v = round_tile(v, row_numbers, column_numbers, row, column, STOCHASTIC, F8, TILES)
    codes = v.to(straight.dtype.element_ty)
    store_tile(codes, straight, row, column, TILES)
    store_transposed(codes, transposed, row, column, TILES)
