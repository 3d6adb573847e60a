"""Tiles of an array: which rows and columns a program holds, and how it loads and stores them.

Arrays are row-major, [ROWS, COLUMNS]. Programs go along the rows first: neighbours share rows.
Blocks of FP8 lie along a row; a tile is a whole number of blocks wide.

A tile's rows come in the order 0, 2, 4, .. 1, 3, 5, ..: a thread, which holds every so manieth of
them, then holds pairs of neighbours, and a transpose moves each pair as one word of 16 bits.
"""

import triton
import triton.language as tl

from coat_jax.kernels.triton.blocks import power_of_two


@triton.jit
def first_row(COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    across: tl.constexpr = (COLUMNS + TILE_COLUMNS - 1) // TILE_COLUMNS
    return (tl.program_id(0) // across) * TILE_ROWS


@triton.jit
def first_column(COLUMNS: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    across: tl.constexpr = (COLUMNS + TILE_COLUMNS - 1) // TILE_COLUMNS
    return (tl.program_id(0) % across) * TILE_COLUMNS


@triton.jit
def tile_indices(COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    """The rows and columns of this program's tile."""
    place = tl.arange(0, TILE_ROWS)
    place = place % (TILE_ROWS // 2) * 2 + place // (TILE_ROWS // 2)
    row = first_row(COLUMNS, TILE_ROWS, TILE_COLUMNS) + place
    return row, first_column(COLUMNS, TILE_COLUMNS) + tl.arange(0, TILE_COLUMNS)


@triton.jit
def load_tile(x, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile in FP32, zero beyond the array."""
    here = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
    at = row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    return tl.load(x + at, mask=here, other=0.0).to(tl.float32)


@triton.jit
def block_offsets(
    row, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_COLUMNS: tl.constexpr, SIZE: tl.constexpr
):
    """Where the numbers that come one per block stand, [rows, blocks]; and which of them exist."""
    blocks: tl.constexpr = (COLUMNS + SIZE - 1) // SIZE
    block = first_column(COLUMNS, TILE_COLUMNS) // SIZE + tl.arange(0, TILE_COLUMNS // SIZE)
    at = row.to(tl.int64)[:, None] * blocks + block[None, :]
    return at, (row < ROWS)[:, None] & (block < blocks)[None, :]


@triton.jit
def load_blocks(
    codes, exponents, row, column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """A tile of blocks, in FP32."""
    q = load_tile(codes, row, column, ROWS, COLUMNS)
    at, there = block_offsets(row, ROWS, COLUMNS, TILE_COLUMNS, SIZE)
    scales = power_of_two(tl.load(exponents + at, mask=there, other=127).to(tl.int32))
    values = tl.reshape(q, [TILE_ROWS, TILE_COLUMNS // SIZE, SIZE]) * scales[:, :, None]
    return tl.reshape(values, [TILE_ROWS, TILE_COLUMNS])


@triton.jit
def store_tile(codes, out, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Stores a tile of FP8 as it is."""
    here = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
    at = row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    tl.store(out + at, codes, mask=here)


@triton.jit
def store_transposed(
    codes, out, row, column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Stores a tile of FP8, or some columns of it, in an array [COLUMNS, ROWS]."""
    if ROWS % 2 == 0:
        halves = tl.reshape(codes.to(tl.uint8, bitcast=True), [2, TILE_ROWS // 2, codes.shape[1]])
        shift = 8 * tl.arange(0, 2).to(tl.uint16)
        pairs = tl.sum(halves.to(tl.uint16) << shift[:, None, None], axis=0, dtype=tl.uint16)
        pair = first_row(COLUMNS, TILE_ROWS, TILE_COLUMNS) // 2 + tl.arange(0, TILE_ROWS // 2)
        at = column.to(tl.int64)[:, None] * (ROWS // 2) + pair[None, :]
        there = (column < COLUMNS)[:, None] & (pair < ROWS // 2)[None, :]
        tl.store(out.to(tl.pointer_type(tl.uint16), bitcast=True) + at, tl.trans(pairs), mask=there)
    else:
        here = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
        at = column.to(tl.int64)[:, None] * ROWS + row[None, :]
        tl.store(out + at, tl.trans(codes), mask=tl.trans(here))
