"""Activations from FP8 to FP8: a = act(gate) up, or a = act(gate) where there is no up.

Without up, its pointers are those to gate and are not read. The pointers to the numbers of blocks
are read only if something is rounded stochastically.
"""

import triton
import triton.language as tl

from coat_jax.kernels.triton.arithmetic import exp2, reciprocal
from coat_jax.kernels.triton.blocks import (
    fitting_exponent,
    inverse_power,
    magnitude_bits,
    power_of_two,
)
from coat_jax.kernels.triton.formats import round_to_fp8
from coat_jax.kernels.triton.int8 import int8_scale, round_to_int8
from coat_jax.kernels.triton.tiles import (
    block_offsets,
    load_blocks,
    load_tile,
    round_tile,
    store_blocks,
    store_tile,
    store_transposed,
    tile_indices,
)


@triton.jit
def sigmoid(x, FAST: tl.constexpr):
    """1 / (1 + e^-x)."""
    return reciprocal(1.0 + exp2(-1.4426950408889634 * x, FAST), FAST)


@triton.jit
def activation(x, NAME: tl.constexpr, FAST: tl.constexpr):
    """act(x) and its derivative."""
    if NAME == "silu":
        s = sigmoid(x, FAST)
        value = x * s
        slope = s + value * (1.0 - s)
    elif NAME == "gelu":
        density = 0.3989422804014327 * exp2(-0.7213475204444817 * x * x, FAST)
        cumulative = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
        value = x * cumulative
        slope = cumulative + x * density
    elif NAME == "gelu_tanh":
        inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        s = sigmoid(inner, FAST)
        value = x * s
        slope = s + value * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    elif NAME == "relu":
        value = tl.maximum(x, 0.0)
        slope = tl.where(x > 0, 1.0, 0.0)
    else:
        tl.static_assert(NAME == "relu2", "no activation of this name")
        slope = 2.0 * tl.maximum(x, 0.0)
        value = 0.25 * slope * slope
    return value, slope


@triton.jit
def store_maxima(
    maxima, v, row,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    PER_MAXIMUM: tl.constexpr,
):  # fmt: skip
    """Stores the largest magnitude of every PER_MAXIMUM columns of a row."""
    v = tl.reshape(magnitude_bits(v), [TILE_ROWS, TILE_COLUMNS // PER_MAXIMUM, PER_MAXIMUM])
    offsets, mask = block_offsets(row, ROWS, COLUMNS, TILE_COLUMNS, PER_MAXIMUM)
    tl.store(maxima + offsets, tl.max(v, axis=2).to(tl.float32, bitcast=True), mask=mask)


@triton.jit
def load_hidden(
    x, row_scale, column_scale, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Loads a tile of values, or of sums in INT32 times the scales of their rows and columns."""
    v = load_tile(x, row, column, ROWS, COLUMNS)
    if x.dtype.element_ty == tl.int32:
        rows = tl.load(row_scale + row, mask=row < ROWS, other=0.0)[:, None]
        columns = tl.load(column_scale + column, mask=column < COLUMNS, other=0.0)[None, :]
        # As `int8.Product.scaled`: the smaller scale first.
        v = v * tl.where(rows < columns, rows, columns) * tl.where(rows < columns, columns, rows)
    return v


@triton.jit
def activation_forward_tile(
    gate, up, first, within, gate_codes, gate_exponents, up_codes, up_exponents, maxima,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    SIZE: tl.constexpr, NAME: tl.constexpr, GATED: tl.constexpr, F8: tl.constexpr,
    PER_MAXIMUM: tl.constexpr, STOCHASTIC: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Stores gate and up in blocks, and the maxima of their activation."""
    row, column = tile_indices(COLUMNS, TILE_ROWS, TILE_COLUMNS)
    g = store_blocks(
        load_tile(gate, row, column, ROWS, COLUMNS),
        gate_codes, gate_exponents, row, column, first, within,
        ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS, SIZE, STOCHASTIC, False, F8, FAST,
    )  # fmt: skip
    a, _ = activation(g, NAME, FAST)
    if GATED:
        a *= store_blocks(
            load_tile(up, row, column, ROWS, COLUMNS),
            up_codes, up_exponents, row, column, first, within,
            ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS, SIZE, STOCHASTIC, True, F8, FAST,
        )  # fmt: skip
    store_maxima(maxima, a, row, ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS, PER_MAXIMUM)


@triton.jit
def activation_cast_tile(
    gate_codes, gate_exponents, up_codes, up_exponents, scale, out,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    SIZE: tl.constexpr, NAME: tl.constexpr, GATED: tl.constexpr, F8: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """The activation of blocks as FP8 codes."""
    row, column = tile_indices(COLUMNS, TILE_ROWS, TILE_COLUMNS)
    g = load_blocks(
        gate_codes, gate_exponents, row, column, ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS, SIZE
    )
    a, _ = activation(g, NAME, FAST)
    if GATED:
        a *= load_blocks(
            up_codes, up_exponents, row, column, ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS, SIZE
        )
    q = round_to_fp8(a * (1.0 / tl.load(scale)), F8, FAST).to(out.dtype.element_ty)
    store_tile(q, out, row, column, ROWS, COLUMNS)


@triton.jit
def activation_backward_tile(
    da, gate_codes, gate_exponents, up_codes, up_exponents, scale, first_scale, second_scale,
    input_rows, gradient_rows, columns,
    recomputed, first, first_transposed, second, second_transposed,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    SIZE: tl.constexpr, NAME: tl.constexpr, GATED: tl.constexpr, STOCHASTIC: tl.constexpr,
    F8: tl.constexpr, GRADIENT_F8: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The gradients of gate and up in both layouts, and a recomputed in the transposed one."""
    row, column = tile_indices(COLUMNS, TILE_ROWS, TILE_COLUMNS)
    # Hides from Triton that more than 8 columns are contiguous: a thread then holds 8 neighbours;
    # it does not have the registers for 16.
    column = column // 8 * 8 + column % 8
    d = load_tile(da, row, column, ROWS, COLUMNS)
    g = load_blocks(
        gate_codes, gate_exponents, row, column, ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS, SIZE
    )
    a, slope = activation(g, NAME, FAST)
    if GATED:
        q = round_tile(
            d * a * (1.0 / tl.load(second_scale)), gradient_rows, columns, row, column,
            ROWS, COLUMNS, STOCHASTIC, GRADIENT_F8, FAST,
        )  # fmt: skip
        q = q.to(second.dtype.element_ty)
        store_tile(q, second, row, column, ROWS, COLUMNS)
        store_transposed(q, second_transposed, row, column, ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS)
        u = load_blocks(
            up_codes, up_exponents, row, column, ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS, SIZE
        )
        a *= u
        d *= u
    q = round_tile(
        d * slope * (1.0 / tl.load(first_scale)), gradient_rows, columns, row, column,
        ROWS, COLUMNS, STOCHASTIC, GRADIENT_F8, FAST,
    )  # fmt: skip
    q = q.to(first.dtype.element_ty)
    store_tile(q, first, row, column, ROWS, COLUMNS)
    store_transposed(q, first_transposed, row, column, ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS)
    q = round_tile(
        a * (1.0 / tl.load(scale)), input_rows, columns, row, column,
        ROWS, COLUMNS, STOCHASTIC, F8, FAST,
    )  # fmt: skip
    q = q.to(recomputed.dtype.element_ty)
    store_transposed(q, recomputed, row, column, ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS)


@triton.jit
def activation_backward_ungated_tile(
    da, codes, exponents, codes_twice, exponents_twice, scale, gradient_scale, scale_twice,
    input_rows, gradient_rows, columns, recomputed, straight, transposed,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    SIZE: tl.constexpr, NAME: tl.constexpr, GATED: tl.constexpr, STOCHASTIC: tl.constexpr,
    F8: tl.constexpr, GRADIENT_F8: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The same without an up, and so with one gradient."""
    activation_backward_tile(
        da, codes, exponents, codes_twice, exponents_twice, scale, gradient_scale, scale_twice,
        input_rows, gradient_rows, columns, recomputed, straight, transposed, straight, transposed,
        ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS, SIZE, NAME, GATED, STOCHASTIC, F8, GRADIENT_F8,
        FAST,
    )  # fmt: skip


@triton.jit
def activation_forward_exact_tile(
    gate, up, row_scale, gate_scale, up_scale, first, within,
    gate_codes, gate_exponents, up_codes, up_exponents, out, maxima,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    SIZE: tl.constexpr, NAME: tl.constexpr, GATED: tl.constexpr, F8: tl.constexpr,
    PER_MAXIMUM: tl.constexpr, STOCHASTIC: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Stores gate and up in blocks, the activation of their exact values, and its maxima.

    A maximum is over both the activations of the exact values and those of the decoded blocks. Gate
    and up may be unscaled INT8 products; otherwise the scales are not read.
    """
    row, column = tile_indices(COLUMNS, TILE_ROWS, TILE_COLUMNS)
    v = load_hidden(gate, row_scale, gate_scale, row, column, ROWS, COLUMNS)
    a, _ = activation(v, NAME, FAST)
    v = store_blocks(
        v, gate_codes, gate_exponents, row, column, first, within,
        ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS, SIZE, STOCHASTIC, False, F8, FAST,
    )  # fmt: skip
    a_rounded, _ = activation(v, NAME, FAST)
    if GATED:
        v = load_hidden(up, row_scale, up_scale, row, column, ROWS, COLUMNS)
        a *= v
        a_rounded *= store_blocks(
            v, up_codes, up_exponents, row, column, first, within,
            ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS, SIZE, STOCHASTIC, True, F8, FAST,
        )  # fmt: skip
    largest = tl.maximum(magnitude_bits(a), magnitude_bits(a_rounded))
    largest = tl.reshape(largest, [TILE_ROWS, TILE_COLUMNS // PER_MAXIMUM, PER_MAXIMUM])
    largest = tl.max(largest, axis=2)
    offsets, mask = block_offsets(row, ROWS, COLUMNS, TILE_COLUMNS, PER_MAXIMUM)
    tl.store(maxima + offsets, largest.to(tl.float32, bitcast=True), mask=mask)
    a = tl.reshape(a, [TILE_ROWS, TILE_COLUMNS // PER_MAXIMUM, PER_MAXIMUM])
    if out.dtype.element_ty == tl.int8:
        a = round_to_int8(a, int8_scale(largest.to(tl.float32, bitcast=True))[:, :, None])
        q = tl.reshape(a, [TILE_ROWS, TILE_COLUMNS])
    else:
        a *= inverse_power(fitting_exponent(largest, F8))[:, :, None]
        q = round_to_fp8(tl.reshape(a, [TILE_ROWS, TILE_COLUMNS]), F8, FAST)
    store_tile(q.to(out.dtype.element_ty), out, row, column, ROWS, COLUMNS)


@triton.jit
def activation_rescale_tile(
    codes, maxima, scale, out,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    SIZE: tl.constexpr, F8: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Codes with a scale per row and SIZE columns become codes with one scale."""
    row, column = tile_indices(COLUMNS, TILE_ROWS, TILE_COLUMNS)
    q = load_tile(codes, row, column, ROWS, COLUMNS)
    offsets, mask = block_offsets(row, ROWS, COLUMNS, TILE_COLUMNS, SIZE)
    largest = tl.load(maxima + offsets, mask=mask, other=0.0)
    factor = power_of_two(fitting_exponent(magnitude_bits(largest), F8)) * (1.0 / tl.load(scale))
    q = tl.reshape(q, [TILE_ROWS, TILE_COLUMNS // SIZE, SIZE]) * factor[:, :, None]
    q = round_to_fp8(tl.reshape(q, [TILE_ROWS, TILE_COLUMNS]), F8, FAST)
    store_tile(q.to(out.dtype.element_ty), out, row, column, ROWS, COLUMNS)
