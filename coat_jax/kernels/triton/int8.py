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
    """`eight_bits.scale_of`: what codes are multiplied by."""
    scale = largest / 127.0
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
def store_int8_row(v, codes, largest, row, column, COLUMNS: tl.constexpr):
    """Stores a whole row as codes, and its largest magnitude."""
    top = finite_or_nan(tl.max(magnitude_bits(v), axis=0).to(tl.float32, bitcast=True))
    tl.store(largest + row, top)
    q = round_to_int8(v, int8_scale(top))
    tl.store(codes + row * COLUMNS + column, q, mask=column < COLUMNS)


@triton.jit
def int8_row(x, codes, largest, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """One row of an array as codes, and its largest magnitude."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    v = tl.load(x + row * COLUMNS + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    store_int8_row(v, codes, largest, row, column, COLUMNS)


@triton.jit
def int8_rows_tile(x, largest, out, TILES: tl.constexpr):
    """One tile of an array, each row with its scale, as codes."""
    row, column, _ = tile_indices(TILES)
    v = load_tile(x, row, column, TILES)
    scale = int8_scale(tl.load(largest + row, mask=row < TILES.rows, other=0.0))
    store_tile(round_to_int8(v, scale[:, None]), out, row, column, TILES)


@triton.jit
def int8_columns_tile(x, largest, out, TILES: tl.constexpr):
    """One tile of an array, each column with its scale, as transposed codes."""
    row, column, _ = tile_indices(TILES)
    v = load_tile(x, row, column, TILES)
    scale = int8_scale(tl.load(largest + column, mask=column < TILES.columns, other=0.0))
    store_transposed(round_to_int8(v, scale[None, :]), out, row, column, TILES)


@triton.jit
def int8_rescale_tile(codes, maxima, largest, out, TILES: tl.constexpr):
    """One tile of `rescale_rows`."""
    row, column, start = tile_indices(TILES)
    top = tl.load(largest + row, mask=row < TILES.rows, other=0.0)
    rescale_rows(codes, maxima, top, out, row, column, start, TILES.block, TILES)


@triton.jit
def rescale_rows(
    codes, maxima, largest, out, row, column, start, SIZE: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    """Codes with a scale per row and SIZE columns become codes with one scale per row."""
    q = load_tile(codes, row, column, TILES)
    offsets, mask = block_offsets(row, start, SIZE, TILES)
    before = int8_scale(tl.load(maxima + offsets, mask=mask, other=0.0))
    factor = before / int8_scale(largest)[:, None]
    q = tl.reshape(q, [TILES.height, TILES.width // SIZE, SIZE])
    q = to_int8(tl.reshape(q * factor[:, :, None], [TILES.height, TILES.width]))
    store_tile(q, out, row, column, TILES)
