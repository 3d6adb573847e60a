"""Norms from FP8 to FP8.

The forward and the backward pass hold whole rows, so that the statistics of a row take one pass.
NORM is a `norm.Constants`. If a scale, shift, mean, residual or noise is absent, its pointer is
that of another array and is not read.
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
    NORM: tl.constexpr, F8: tl.constexpr,
):  # fmt: skip
    """One row: its blocks, its statistics, and its norm as FP8 codes, or in the dtype of x."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, NORM.width)
    v = save_and_normalize(
        x, first_numbers, scale, shift, codes, exponents, inverse, mean, row, column, NORM, F8
    )
    if normalized.dtype.element_ty.primitive_bitwidth == 8:
        v = round_to_fp8(v * (1.0 / tl.load(tensor_scale)), F8)
    q = v.to(normalized.dtype.element_ty)
    tl.store(normalized + row * NORM.columns + column, q, mask=column < NORM.columns)


@triton.jit
def norm_forward_row_int8(
    x, first_numbers, scale, shift, codes, exponents, inverse, mean, normalized, largest,
    NORM: tl.constexpr, F8: tl.constexpr,
):  # fmt: skip
    """One row: its blocks, its statistics, and its norm as INT8 codes with their largest value."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, NORM.width)
    v = save_and_normalize(
        x, first_numbers, scale, shift, codes, exponents, inverse, mean, row, column, NORM, F8
    )
    top = finite_or_nan(tl.max(magnitude_bits(v), axis=0).to(tl.float32, bitcast=True))
    tl.store(largest + row, top)
    q = round_to_int8(v, int8_scale(top))
    tl.store(normalized + row * NORM.columns + column, q, mask=column < NORM.columns)


@triton.jit
def save_and_normalize(
    x, first_numbers, scale, shift, codes, exponents, inverse, mean, row, column,
    NORM: tl.constexpr, F8: tl.constexpr,
):  # fmt: skip
    """Stores a row's blocks and statistics, for the backward pass; returns its norm."""
    mask = column < NORM.columns
    block = tl.arange(0, NORM.width // NORM.block)
    blocks: tl.constexpr = (NORM.columns + NORM.block - 1) // NORM.block
    v = tl.load(x + row * NORM.columns + column, mask=mask, other=0.0).to(tl.float32)
    v = tl.reshape(v, [NORM.width // NORM.block, NORM.block])
    e = fitting_exponent(tl.max(magnitude_bits(v), axis=1), F8)
    number = tl.load(first_numbers + row) + block.to(tl.uint32) if NORM.stochastic else None
    q = round_blocks(v, e, number, False, F8)
    flat = tl.reshape(q, [NORM.width])
    tl.store(codes + row * NORM.columns + column, flat.to(codes.dtype.element_ty), mask=mask)
    tl.store(exponents + row * blocks + block, e.to(tl.uint8), mask=block < blocks)

    # The norm of the rounded values, or of x.
    if not NORM.exact:
        v = through_fp8(q, codes.dtype.element_ty) * power_of_two(e)[:, None]
    v = tl.reshape(v, [NORM.width])
    v, factor, center = normalize_row(v, scale, shift, column, NORM)
    if NORM.layer:
        tl.store(mean + row, center)
    tl.store(inverse + row, factor)
    return v


@triton.jit
def normalize_row(v, scale, shift, column, NORM: tl.constexpr):
    """The norm of a row with zeros past its end; and what it was multiplied by, and its mean."""
    mask = column < NORM.columns
    center = tl.sum(v, axis=0) / NORM.columns
    if NORM.layer:
        v = tl.where(mask, v - center, 0.0)
    factor = 1.0 / tl.sqrt(tl.sum(v * v, axis=0) / NORM.columns + NORM.eps)
    v = v * factor
    if NORM.has_scale:
        v = v * tl.load(scale + column, mask=mask, other=0.0).to(tl.float32)
    if NORM.has_shift:
        v = v + tl.load(shift + column, mask=mask, other=0.0).to(tl.float32)
    return v, factor, center


@triton.jit
def norm_cast_tile(
    codes, exponents, tensor_scale, inverse, mean, row_numbers, column_numbers, scale, shift, out,
    NORM: tl.constexpr, F8: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One tile of norm(x), from blocks and statistics, as transposed FP8 codes."""
    row, column = tile_indices(TILES)
    rows, columns = row < TILES.rows, column < TILES.columns
    v = load_blocks(codes, exponents, row, column, TILES)
    if NORM.layer:
        v = v - tl.load(mean + row, mask=rows, other=0.0)[:, None]
    v = v * tl.load(inverse + row, mask=rows, other=0.0)[:, None]
    if NORM.has_scale:
        v = v * tl.load(scale + column, mask=columns, other=0.0).to(tl.float32)[None, :]
    if NORM.has_shift:
        v = v + tl.load(shift + column, mask=columns, other=0.0).to(tl.float32)[None, :]
    q = round_tile(
        v * (1.0 / tl.load(tensor_scale)), row_numbers, column_numbers, row, column,
        NORM.stochastic, F8, TILES,
    )  # fmt: skip
    store_transposed(q.to(out.dtype.element_ty), out, row, column, TILES)


@triton.jit
def norm_backward_rows(
    codes, exponents, dn, inverse, mean, residual, scale, dx, d_scale, d_shift, NORM: tl.constexpr
):
    """The gradient of some rows of x, and what they add to the gradients of scale and shift."""
    WIDTH: tl.constexpr = NORM.width
    column = tl.arange(0, WIDTH)
    mask = column < NORM.columns
    sum_for_scale = tl.zeros([WIDTH], tl.float32)
    sum_for_shift = tl.zeros([WIDTH], tl.float32)
    if NORM.has_scale:
        weight = tl.load(scale + column, mask=mask, other=0.0).to(tl.float32)
    program = tl.program_id(0).to(tl.int64)
    for i in range(NORM.sums):
        row = program * NORM.sums + i
        offsets = row * NORM.columns + column
        unit = load_row_of_blocks(codes, exponents, row, column, NORM)
        if NORM.layer:
            unit = tl.where(mask, unit - tl.load(mean + row), 0.0)
        factor = tl.load(inverse + row)
        unit = unit * factor
        d = tl.load(dn + offsets, mask=mask, other=0.0).to(tl.float32)
        if NORM.residual:  # loaded early: all threads wait for the sums below
            from_residual = tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
        if NORM.has_shift:
            sum_for_shift += d
        if NORM.has_scale:
            sum_for_scale += d * unit
            d = d * weight
        result = d - unit * (tl.sum(d * unit, axis=0) / NORM.columns)
        if NORM.layer:
            result = result - tl.sum(d, axis=0) / NORM.columns
        result = result * factor
        if NORM.residual:
            result += from_residual
        tl.store(dx + offsets, result.to(dx.dtype.element_ty), mask=mask)
    offsets = program * NORM.columns + column
    if NORM.has_scale:
        tl.store(d_scale + offsets, sum_for_scale, mask=mask)
    if NORM.has_shift:
        tl.store(d_shift + offsets, sum_for_shift, mask=mask)


@triton.jit
def norm_backward_rows_one(
    codes, exponents, dn, inverse, mean, residual, scale, dx, learned, NORM: tl.constexpr
):
    """The same for a norm with one parameter."""
    norm_backward_rows(
        codes, exponents, dn, inverse, mean, residual, scale, dx, learned, learned, NORM
    )


@triton.jit
def norm_backward_rows_none(
    codes, exponents, dn, inverse, mean, residual, scale, dx, NORM: tl.constexpr
):
    """The same for a norm without parameters."""
    norm_backward_rows(codes, exponents, dn, inverse, mean, residual, scale, dx, dx, dx, NORM)


# By the number of parameters that the norm has.
NORM_BACKWARD = (norm_backward_rows_none, norm_backward_rows_one, norm_backward_rows)
