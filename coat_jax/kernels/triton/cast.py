"""FP8 codes of an array in one layout or both, and sums of their squares.

Every output is a parameter of the kernel, hence one entry point per combination of outputs. CAST is
a `kernels.cast.Cast`: outputs that are not wanted are not written.
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
def cast_both_and_squares(
    x, scale, row_numbers, column_numbers, straight, transposed, squares,
    CAST: tl.constexpr, F8: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One tile in both layouts, and sums of squares."""
    row, column = tile_indices(TILES)
    y = load_tile(x, row, column, TILES) * (1.0 / tl.load(scale))
    y = round_tile(y, row_numbers, column_numbers, row, column, CAST.stochastic, F8, TILES)
    codes = y.to(straight.dtype.element_ty)
    if CAST.straight:
        store_tile(codes, straight, row, column, TILES)
    if CAST.transposed:
        store_transposed(codes, transposed, row, column, TILES)
    if CAST.per_sum:
        y = through_fp8(y, straight.dtype.element_ty)
        y = tl.reshape(y * y, [TILES.height, TILES.width // CAST.per_sum, CAST.per_sum])
        offsets, mask = block_offsets(row, CAST.per_sum, TILES)
        tl.store(squares + offsets, tl.sum(y, axis=2), mask=mask)


@triton.jit
def cast_one(
    x, scale, row_numbers, column_numbers, out,
    CAST: tl.constexpr, F8: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One layout."""
    cast_both_and_squares(x, scale, row_numbers, column_numbers, out, out, out, CAST, F8, TILES)


@triton.jit
def cast_one_and_squares(
    x, scale, row_numbers, column_numbers, out, squares,
    CAST: tl.constexpr, F8: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One layout, and sums of squares."""
    cast_both_and_squares(x, scale, row_numbers, column_numbers, out, out, squares, CAST, F8, TILES)


@triton.jit
def cast_both(
    x, scale, row_numbers, column_numbers, straight, transposed,
    CAST: tl.constexpr, F8: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Both layouts."""
    cast_both_and_squares(
        x, scale, row_numbers, column_numbers, straight, transposed, straight,
        CAST, F8, TILES,
    )  # fmt: skip


# (both layouts, sums of squares) -> entry point
ENTRIES = {
    (False, False): cast_one,
    (False, True): cast_one_and_squares,
    (True, False): cast_both,
    (True, True): cast_both_and_squares,
}
