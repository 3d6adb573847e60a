"""Tiles of an array: which rows and columns a program works on, and how it loads and stores them.

Arrays are row-major, [ROWS, COLUMNS]. Consecutive programs take consecutive tiles of the same rows.
Blocks of FP8 lie along a row, and a tile is a whole number of blocks wide.

The rows of a tile come in the order 0, 2, 4, .. 1, 3, 5, .. A thread holds every n-th of them, and
thereby pairs of adjacent rows. A transposed store writes each pair as one word of 16 bits.
"""

import triton
import triton.language as tl

from coat_jax.kernels.triton.blocks import (
    fitting_exponent,
    magnitude_bits,
    power_of_two,
    round_blocks,
)
from coat_jax.kernels.triton.formats import round_at_random, round_to_fp8, through_fp8
from coat_jax.kernels.triton.noise import of_places


@triton.jit
def first_row(COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    """The first row of this program's tile."""
    across: tl.constexpr = (COLUMNS + TILE_COLUMNS - 1) // TILE_COLUMNS
    return (tl.program_id(0) // across) * TILE_ROWS


@triton.jit
def first_column(COLUMNS: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    """The first column of this program's tile."""
    across: tl.constexpr = (COLUMNS + TILE_COLUMNS - 1) // TILE_COLUMNS
    return (tl.program_id(0) % across) * TILE_COLUMNS


@triton.jit
def tile_indices(COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    """The rows and the columns of this program's tile."""
    i = tl.arange(0, TILE_ROWS)
    shuffled = i % (TILE_ROWS // 2) * 2 + i // (TILE_ROWS // 2)
    row = first_row(COLUMNS, TILE_ROWS, TILE_COLUMNS) + shuffled
    return row, first_column(COLUMNS, TILE_COLUMNS) + tl.arange(0, TILE_COLUMNS)


@triton.jit
def load_tile(x, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Loads a tile in FP32, with zeros outside the array."""
    mask = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
    offsets = row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    return tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def block_offsets(
    row, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_COLUMNS: tl.constexpr, SIZE: tl.constexpr
):
    """Offsets [rows, blocks] into an array with one number per block, and their mask."""
    blocks: tl.constexpr = (COLUMNS + SIZE - 1) // SIZE
    block = first_column(COLUMNS, TILE_COLUMNS) // SIZE + tl.arange(0, TILE_COLUMNS // SIZE)
    offsets = row.to(tl.int64)[:, None] * blocks + block[None, :]
    return offsets, (row < ROWS)[:, None] & (block < blocks)[None, :]


@triton.jit
def load_blocks(
    codes, exponents, row, column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Loads a tile that is stored in blocks, decoded to FP32."""
    q = load_tile(codes, row, column, ROWS, COLUMNS)
    offsets, mask = block_offsets(row, ROWS, COLUMNS, TILE_COLUMNS, SIZE)
    scales = power_of_two(tl.load(exponents + offsets, mask=mask, other=127).to(tl.int32))
    values = tl.reshape(q, [TILE_ROWS, TILE_COLUMNS // SIZE, SIZE]) * scales[:, :, None]
    return tl.reshape(values, [TILE_ROWS, TILE_COLUMNS])


@triton.jit
def load_block_numbers(
    first, within, row,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_COLUMNS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The numbers [rows, blocks] of a tile's blocks; see `numerics.blocks.BlockNumbers`."""
    blocks: tl.constexpr = (COLUMNS + SIZE - 1) // SIZE
    block = first_column(COLUMNS, TILE_COLUMNS) // SIZE + tl.arange(0, TILE_COLUMNS // SIZE)
    first_of_row = tl.load(first + row, mask=row < ROWS, other=0)
    return first_of_row[:, None] + tl.load(within + block, mask=block < blocks, other=0)[None, :]


@triton.jit
def store_blocks(
    v, codes, exponents, row, column, first, within,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    SIZE: tl.constexpr, STOCHASTIC: tl.constexpr, ANTITHETIC: tl.constexpr, F8: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Stores a tile in blocks. Returns the values that they decode to.

    If STOCHASTIC, `first` and `within` point to the numbers of blocks; otherwise they are not read,
    and ANTITHETIC has no effect.
    """
    v = tl.reshape(v, [TILE_ROWS, TILE_COLUMNS // SIZE, SIZE])
    e = fitting_exponent(tl.max(magnitude_bits(v), axis=2), F8)
    number = None
    if STOCHASTIC:
        number = load_block_numbers(first, within, row, ROWS, COLUMNS, TILE_COLUMNS, SIZE)
    q = round_blocks(v, e, number, ANTITHETIC, F8, FAST)
    flat = tl.reshape(q, [TILE_ROWS, TILE_COLUMNS]).to(codes.dtype.element_ty)
    store_tile(flat, codes, row, column, ROWS, COLUMNS)
    offsets, mask = block_offsets(row, ROWS, COLUMNS, TILE_COLUMNS, SIZE)
    tl.store(exponents + offsets, e.to(tl.uint8), mask=mask)
    v = through_fp8(q, codes.dtype.element_ty, FAST) * power_of_two(e)[:, :, None]
    return tl.reshape(v, [TILE_ROWS, TILE_COLUMNS])


@triton.jit
def round_tile(
    y, row_numbers, column_numbers, row, column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STOCHASTIC: tl.constexpr, F8: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Rounds a tile to nearest, or at random: each element by its place in the whole array."""
    if STOCHASTIC:
        run = tl.load(row_numbers + row, mask=row < ROWS, other=0)
        lane = tl.load(column_numbers + column, mask=column < COLUMNS, other=0)
        y = round_at_random(y, of_places(run[:, None], lane[None, :]), F8, FAST)
    else:
        y = round_to_fp8(y, F8, FAST)
    return y


@triton.jit
def store_tile(codes, out, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Stores a tile of FP8 codes."""
    mask = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
    offsets = row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    tl.store(out + offsets, codes, mask=mask)


@triton.jit
def store_transposed(
    codes, out, row, column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Stores a tile of FP8 codes, or some of its columns, in an array [COLUMNS, ROWS]."""
    if ROWS % 2 == 0:
        halves = tl.reshape(codes.to(tl.uint8, bitcast=True), [2, TILE_ROWS // 2, codes.shape[1]])
        shift = 8 * tl.arange(0, 2).to(tl.uint16)
        pairs = tl.sum(halves.to(tl.uint16) << shift[:, None, None], axis=0, dtype=tl.uint16)
        pair = first_row(COLUMNS, TILE_ROWS, TILE_COLUMNS) // 2 + tl.arange(0, TILE_ROWS // 2)
        offsets = column.to(tl.int64)[:, None] * (ROWS // 2) + pair[None, :]
        mask = (column < COLUMNS)[:, None] & (pair < ROWS // 2)[None, :]
        tl.store(
            out.to(tl.pointer_type(tl.uint16), bitcast=True) + offsets, tl.trans(pairs), mask=mask
        )
    else:
        mask = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
        offsets = column.to(tl.int64)[:, None] * ROWS + row[None, :]
        tl.store(out + offsets, tl.trans(codes), mask=tl.trans(mask))
