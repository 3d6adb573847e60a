"""Norms from FP8 to FP8.

The forward and the backward pass hold whole rows, so that the statistics of a row take one pass.
If a scale, shift, mean, residual or noise is absent, its pointer is that of another array and is
not read.
"""

import triton
import triton.language as tl

from coat_jax.kernels.triton.blocks import (
    fitting_exponent,
    load_row_of_blocks,
    magnitude_bits,
    power_of_two,
    round_blocks,
)
from coat_jax.kernels.triton.formats import round_to_fp8, through_fp8
from coat_jax.kernels.triton.int8 import finite_or_nan, int8_scale, round_to_int8
from coat_jax.kernels.triton.tiles import load_blocks, round_tile, store_transposed, tile_indices


@triton.jit
def norm_forward_row(
    x, first_numbers, tensor_scale, scale, shift, codes, exponents, inverse, mean, normalized,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, LAYER: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_SHIFT: tl.constexpr, EPS: tl.constexpr, EXACT: tl.constexpr,
    STOCHASTIC: tl.constexpr, F8: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """One row: its blocks, its statistics, and its norm as FP8 codes."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    v = save_and_normalize(
        x, first_numbers, scale, shift, codes, exponents, inverse, mean, row, column,
        COLUMNS, WIDTH, SIZE, LAYER, HAS_SCALE, HAS_SHIFT, EPS, EXACT, STOCHASTIC, F8, FAST,
    )  # fmt: skip
    q = round_to_fp8(v * (1.0 / tl.load(tensor_scale)), F8, FAST).to(normalized.dtype.element_ty)
    tl.store(normalized + row * COLUMNS + column, q, mask=column < COLUMNS)


@triton.jit
def norm_forward_row_int8(
    x, first_numbers, scale, shift, codes, exponents, inverse, mean, normalized, largest,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, LAYER: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_SHIFT: tl.constexpr, EPS: tl.constexpr, EXACT: tl.constexpr,
    STOCHASTIC: tl.constexpr, F8: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """One row: its blocks, its statistics, and its norm as INT8 codes with their largest value."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    v = save_and_normalize(
        x, first_numbers, scale, shift, codes, exponents, inverse, mean, row, column,
        COLUMNS, WIDTH, SIZE, LAYER, HAS_SCALE, HAS_SHIFT, EPS, EXACT, STOCHASTIC, F8, FAST,
    )  # fmt: skip
    top = finite_or_nan(tl.max(magnitude_bits(v), axis=0).to(tl.float32, bitcast=True))
    tl.store(largest + row, top)
    q = round_to_int8(v, int8_scale(top))
    tl.store(normalized + row * COLUMNS + column, q, mask=column < COLUMNS)


@triton.jit
def save_and_normalize(
    x, first_numbers, scale, shift, codes, exponents, inverse, mean, row, column,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, LAYER: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_SHIFT: tl.constexpr, EPS: tl.constexpr, EXACT: tl.constexpr,
    STOCHASTIC: tl.constexpr, F8: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Stores a row's blocks and statistics, for the backward pass; returns its norm."""
    mask = column < COLUMNS
    block = tl.arange(0, WIDTH // SIZE)
    blocks: tl.constexpr = (COLUMNS + SIZE - 1) // SIZE
    v = tl.load(x + row * COLUMNS + column, mask=mask, other=0.0).to(tl.float32)
    v = tl.reshape(v, [WIDTH // SIZE, SIZE])
    e = fitting_exponent(tl.max(magnitude_bits(v), axis=1), F8)
    number = tl.load(first_numbers + row) + block.to(tl.uint32) if STOCHASTIC else None
    q = round_blocks(v, e, number, False, F8, FAST)
    flat = tl.reshape(q, [WIDTH])
    tl.store(codes + row * COLUMNS + column, flat.to(codes.dtype.element_ty), mask=mask)
    tl.store(exponents + row * blocks + block, e.to(tl.uint8), mask=block < blocks)

    # The norm of the rounded values, or of x.
    if not EXACT:
        v = through_fp8(q, codes.dtype.element_ty, FAST) * power_of_two(e)[:, None]
    v = tl.reshape(v, [WIDTH])
    if LAYER:
        center = tl.sum(v, axis=0) / COLUMNS
        tl.store(mean + row, center)
        v = tl.where(mask, v - center, 0.0)
    factor = 1.0 / tl.sqrt(tl.sum(v * v, axis=0) / COLUMNS + EPS)
    tl.store(inverse + row, factor)
    v = v * factor
    if HAS_SCALE:
        v = v * tl.load(scale + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_SHIFT:
        v = v + tl.load(shift + column, mask=mask, other=0.0).to(tl.float32)
    return v


@triton.jit
def norm_cast_tile(
    codes, exponents, tensor_scale, inverse, mean, row_numbers, column_numbers, scale, shift, out,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr, LAYER: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_SHIFT: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, STOCHASTIC: tl.constexpr,
    F8: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """One tile of norm(x), from blocks and statistics, as transposed FP8 codes."""
    row, column = tile_indices(COLUMNS, TILE_ROWS, TILE_COLUMNS)
    v = load_blocks(codes, exponents, row, column, ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS, SIZE)
    if LAYER:
        v = v - tl.load(mean + row, mask=row < ROWS, other=0.0)[:, None]
    v = v * tl.load(inverse + row, mask=row < ROWS, other=0.0)[:, None]
    if HAS_SCALE:
        v = v * tl.load(scale + column, mask=column < COLUMNS, other=0.0).to(tl.float32)[None, :]
    if HAS_SHIFT:
        v = v + tl.load(shift + column, mask=column < COLUMNS, other=0.0).to(tl.float32)[None, :]
    q = round_tile(
        v * (1.0 / tl.load(tensor_scale)), row_numbers, column_numbers, row, column,
        ROWS, COLUMNS, STOCHASTIC, F8, FAST,
    )  # fmt: skip
    q = q.to(out.dtype.element_ty)
    store_transposed(q, out, row, column, ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS)


@triton.jit
def norm_backward_rows(
    codes, exponents, dn, inverse, mean, residual, scale, dx, d_scale, d_shift,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, SUMS: tl.constexpr,
    RESIDUAL: tl.constexpr, LAYER: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_SHIFT: tl.constexpr,
):  # fmt: skip
    """The gradient of SUMS rows of x, and what they add to the gradients of scale and shift."""
    column = tl.arange(0, WIDTH)
    mask = column < COLUMNS
    sum_for_scale = tl.zeros([WIDTH], tl.float32)
    sum_for_shift = tl.zeros([WIDTH], tl.float32)
    if HAS_SCALE:
        weight = tl.load(scale + column, mask=mask, other=0.0).to(tl.float32)
    program = tl.program_id(0).to(tl.int64)
    for i in range(SUMS):
        row = program * SUMS + i
        offsets = row * COLUMNS + column
        unit = load_row_of_blocks(codes, exponents, row, column, COLUMNS, WIDTH, SIZE)
        if LAYER:
            unit = tl.where(mask, unit - tl.load(mean + row), 0.0)
        factor = tl.load(inverse + row)
        unit = unit * factor
        d = tl.load(dn + offsets, mask=mask, other=0.0).to(tl.float32)
        if RESIDUAL:  # loaded early: all threads wait for the sums below
            from_residual = tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
        if HAS_SHIFT:
            sum_for_shift += d
        if HAS_SCALE:
            sum_for_scale += d * unit
            d = d * weight
        result = d - unit * (tl.sum(d * unit, axis=0) / COLUMNS)
        if LAYER:
            result = result - tl.sum(d, axis=0) / COLUMNS
        result = result * factor
        if RESIDUAL:
            result += from_residual
        tl.store(dx + offsets, result.to(dx.dtype.element_ty), mask=mask)
    offsets = program * COLUMNS + column
    if HAS_SCALE:
        tl.store(d_scale + offsets, sum_for_scale, mask=mask)
    if HAS_SHIFT:
        tl.store(d_shift + offsets, sum_for_shift, mask=mask)


@triton.jit
def norm_backward_rows_one(
    codes, exponents, dn, inverse, mean, residual, scale, dx, learned,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, SUMS: tl.constexpr,
    RESIDUAL: tl.constexpr, LAYER: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_SHIFT: tl.constexpr,
):  # fmt: skip
    """The same for a norm with one parameter."""
    norm_backward_rows(
        codes, exponents, dn, inverse, mean, residual, scale, dx, learned, learned,
        COLUMNS, WIDTH, SIZE, SUMS, RESIDUAL, LAYER, HAS_SCALE, HAS_SHIFT,
    )  # fmt: skip


@triton.jit
def norm_backward_rows_none(
    codes, exponents, dn, inverse, mean, residual, scale, dx,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, SUMS: tl.constexpr,
    RESIDUAL: tl.constexpr, LAYER: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_SHIFT: tl.constexpr,
):  # fmt: skip
    """The same for a norm without parameters."""
    norm_backward_rows(
        codes, exponents, dn, inverse, mean, residual, scale, dx, dx, dx,
        COLUMNS, WIDTH, SIZE, SUMS, RESIDUAL, LAYER, HAS_SCALE, HAS_SHIFT,
    )  # fmt: skip


# By the number of parameters that the norm has.
NORM_BACKWARD = (norm_backward_rows_none, norm_backward_rows_one, norm_backward_rows)
