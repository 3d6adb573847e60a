"""Tiles of an array: which rows and columns a program works on, and how it loads and stores them.

TILES is a `launch.Tiles`. Arrays are row-major, [TILES.rows, TILES.columns]. Consecutive programs
take consecutive tiles of the same rows. Blocks of FP8, of TILES.block numbers, lie along a row, and
a tile is a whole number of blocks wide.

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
def first_row(TILES: tl.constexpr):
    """The first row of this program's tile."""
    across: tl.constexpr = (TILES.columns + TILES.width - 1) // TILES.width
    return (tl.program_id(0) // across) * TILES.height


@triton.jit
def first_column(TILES: tl.constexpr):
    """The first column of this program's tile."""
    across: tl.constexpr = (TILES.columns + TILES.width - 1) // TILES.width
    return (tl.program_id(0) % across) * TILES.width


@triton.jit
def tile_indices(TILES: tl.constexpr):
    """The rows and the columns of this program's tile."""
    i = tl.arange(0, TILES.height)
    shuffled = i % (TILES.height // 2) * 2 + i // (TILES.height // 2)
    row = first_row(TILES) + shuffled
    return row, first_column(TILES) + tl.arange(0, TILES.width)


@triton.jit
def load_tile(x, row, column, TILES: tl.constexpr):
    """Loads a tile in FP32, with zeros outside the array."""
    mask = (row < TILES.rows)[:, None] & (column < TILES.columns)[None, :]
    offsets = row.to(tl.int64)[:, None] * TILES.columns + column[None, :]
    return tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def block_offsets(row, SIZE: tl.constexpr, TILES: tl.constexpr):
    """Offsets [rows, blocks] into an array with one number per SIZE columns, and their mask."""
    blocks: tl.constexpr = (TILES.columns + SIZE - 1) // SIZE
    block = first_column(TILES) // SIZE + tl.arange(0, TILES.width // SIZE)
    offsets = row.to(tl.int64)[:, None] * blocks + block[None, :]
    return offsets, (row < TILES.rows)[:, None] & (block < blocks)[None, :]


@triton.jit
def load_blocks(codes, exponents, row, column, TILES: tl.constexpr):
    """Loads a tile that is stored in blocks, decoded to FP32."""
    q = load_tile(codes, row, column, TILES)
    offsets, mask = block_offsets(row, TILES.block, TILES)
    scales = power_of_two(tl.load(exponents + offsets, mask=mask, other=127).to(tl.int32))
    q = tl.reshape(q, [TILES.height, TILES.width // TILES.block, TILES.block])
    return tl.reshape(q * scales[:, :, None], [TILES.height, TILES.width])


@triton.jit
def load_block_numbers(first, within, row, TILES: tl.constexpr):
    """The numbers [rows, blocks] of a tile's blocks; see `numerics.blocks.BlockNumbers`."""
    blocks: tl.constexpr = (TILES.columns + TILES.block - 1) // TILES.block
    block = first_column(TILES) // TILES.block + tl.arange(0, TILES.width // TILES.block)
    first_of_row = tl.load(first + row, mask=row < TILES.rows, other=0)
    return first_of_row[:, None] + tl.load(within + block, mask=block < blocks, other=0)[None, :]


@triton.jit
def store_blocks(
    v, codes, exponents, row, column, first, within,
    STOCHASTIC: tl.constexpr, ANTITHETIC: tl.constexpr, F8: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Stores a tile in blocks. Returns the values that they decode to.

    If STOCHASTIC, `first` and `within` point to the numbers of blocks; otherwise they are not read,
    and ANTITHETIC has no effect.
    """
    v = tl.reshape(v, [TILES.height, TILES.width // TILES.block, TILES.block])
    e = fitting_exponent(tl.max(magnitude_bits(v), axis=2), F8)
    number = None
    if STOCHASTIC:
        number = load_block_numbers(first, within, row, TILES)
    q = round_blocks(v, e, number, ANTITHETIC, F8)
    flat = tl.reshape(q, [TILES.height, TILES.width]).to(codes.dtype.element_ty)
    store_tile(flat, codes, row, column, TILES)
    offsets, mask = block_offsets(row, TILES.block, TILES)
    tl.store(exponents + offsets, e.to(tl.uint8), mask=mask)
    v = through_fp8(q, codes.dtype.element_ty) * power_of_two(e)[:, :, None]
    return tl.reshape(v, [TILES.height, TILES.width])


@triton.jit
def round_tile(
    y, row_numbers, column_numbers, row, column,
    STOCHASTIC: tl.constexpr, F8: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Rounds a tile to nearest, or at random: each element by its place in the whole array."""
    if STOCHASTIC:
        run = tl.load(row_numbers + row, mask=row < TILES.rows, other=0)
        lane = tl.load(column_numbers + column, mask=column < TILES.columns, other=0)
        y = round_at_random(y, of_places(run[:, None], lane[None, :]), F8)
    else:
        y = round_to_fp8(y, F8)
    return y


@triton.jit
def store_tile(codes, out, row, column, TILES: tl.constexpr):
    """Stores a tile of FP8 codes."""
    mask = (row < TILES.rows)[:, None] & (column < TILES.columns)[None, :]
    offsets = row.to(tl.int64)[:, None] * TILES.columns + column[None, :]
    tl.store(out + offsets, codes, mask=mask)


@triton.jit
def store_transposed(codes, out, row, column, TILES: tl.constexpr):
    """Stores a tile of FP8 codes, or some of its columns, in an array [columns, rows]."""
    HALF: tl.constexpr = TILES.height // 2
    if TILES.rows % 2 == 0:
        halves = tl.reshape(codes.to(tl.uint8, bitcast=True), [2, HALF, codes.shape[1]])
        shift = 8 * tl.arange(0, 2).to(tl.uint16)
        pairs = tl.sum(halves.to(tl.uint16) << shift[:, None, None], axis=0, dtype=tl.uint16)
        pair = first_row(TILES) // 2 + tl.arange(0, HALF)
        offsets = column.to(tl.int64)[:, None] * (TILES.rows // 2) + pair[None, :]
        mask = (column < TILES.columns)[:, None] & (pair < TILES.rows // 2)[None, :]
        tl.store(
            out.to(tl.pointer_type(tl.uint16), bitcast=True) + offsets, tl.trans(pairs), mask=mask
        )
    else:
        mask = (row < TILES.rows)[:, None] & (column < TILES.columns)[None, :]
        offsets = column.to(tl.int64)[:, None] * TILES.rows + row[None, :]
        tl.store(out + offsets, tl.trans(codes), mask=tl.trans(mask))
