"""Rounding to INT8, with a scale from the largest magnitude: the counterpart of `kernels.int8`.

It multiplies by a reciprocal where `numerics.eight_bits` divides: a number that is halfway between
two codes may become either of them. Nothing saturates, because the largest magnitude has a code. If
the largest magnitude is NaN, the scale is NaN and the codes are meaningless.
"""

import triton
import triton.language as tl

from coat_jax.kernels.triton.blocks import magnitude_bits
from coat_jax.kernels.triton.tiles import (
    block_offsets,
    first_column,
    first_row,
    load_tile,
    store_tile,
    store_transposed,
    tile_indices,
)


@triton.jit
def finite_or_nan(largest):
    """A largest magnitude; NaN if it is infinite."""
    return tl.where(largest < float("inf"), largest, float("nan"))


@triton.jit
def int8_scale(largest):
    """What INT8 codes are multiplied by."""
    return scale_of(largest, 127.0)


@triton.jit
def scale_of(largest, LIMIT: tl.constexpr):
    """`eight_bits.scale_of` of numbers whose largest has the code LIMIT."""
    scale = largest / LIMIT
    # Not a maximum, which would lose a NaN.
    scale = tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)
    return tl.where(largest == 0.0, 1.0, scale)


@triton.jit
def round_to_int8(x, scale):
    """The INT8 codes of x / scale."""
    return to_int8(x * (1.0 / scale))


@triton.jit
def to_int8(y):
    """The INT8 codes of numbers up to 127 that are scaled already; NaN becomes any code."""
    # Near 1.5 * 2^23 the last bit of FP32 stands for 1: the sum is rounded to a whole number, ties
    # to even, and has the last 8 bits of that number.
    return (y + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def column_maxima_tile(x, maxima, TILES: tl.constexpr):
    """The largest magnitude of each column of a tile, compared as bits, so that NaN is largest."""
    tile_row = first_row(TILES) // TILES.height
    row = tile_row * TILES.height + tl.arange(0, TILES.height)
    column = first_column(TILES) + tl.arange(0, TILES.width)
    largest = tl.max(magnitude_bits(load_tile(x, row, column, TILES)), axis=0)
    offsets = tile_row.to(tl.int64) * TILES.columns + column
    tl.store(maxima + offsets, largest.to(tl.float32, bitcast=True), mask=column < TILES.columns)


@triton.jit
def int8_rows_tile(x, largest, out, TILES: tl.constexpr):
    """One tile of an array, each row with its scale, as codes."""
    row, column = tile_indices(TILES)
    v = load_tile(x, row, column, TILES)
    scale = int8_scale(tl.load(largest + row, mask=row < TILES.rows, other=0.0))
    store_tile(round_to_int8(v, scale[:, None]), out, row, column, TILES)


@triton.jit
def int8_columns_tile(x, largest, out, TILES: tl.constexpr):
    """One tile of an array, each column with its scale, as transposed codes."""
    row, column = tile_indices(TILES)
    v = load_tile(x, row, column, TILES)
    scale = int8_scale(tl.load(largest + column, mask=column < TILES.columns, other=0.0))
    store_transposed(round_to_int8(v, scale[None, :]), out, row, column, TILES)


@triton.jit
def int8_rescale_tile(codes, maxima, largest, out, TILES: tl.constexpr):
    """Codes with a scale per row and block become codes with one scale per row."""
    row, column = tile_indices(TILES)
    q = load_tile(codes, row, column, TILES)
    offsets, mask = block_offsets(row, TILES.block, TILES)
    before = int8_scale(tl.load(maxima + offsets, mask=mask, other=0.0))
    after = int8_scale(tl.load(largest + row, mask=row < TILES.rows, other=0.0))
    factor = before / after[:, None]
    q = tl.reshape(q, [TILES.height, TILES.width // TILES.block, TILES.block])
    q = to_int8(tl.reshape(q * factor[:, :, None], [TILES.height, TILES.width]))
    store_tile(q, out, row, column, TILES)
