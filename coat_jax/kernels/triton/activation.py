"""Activations from FP8 to FP8: a = act(gate) up, or a = act(gate) where there is no up.

ACT is an `activation.Constants`. Without up, its pointers are those to gate and are not read. The
pointers to the numbers of blocks are read only if something is rounded stochastically.
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
def sigmoid(x):
    """1 / (1 + e^-x)."""
    return reciprocal(1.0 + exp2(-1.4426950408889634 * x))


@triton.jit
def activation(x, ACT: tl.constexpr):
    """act(x) and its derivative, where x is at most ACT.limit if there is a limit."""
    unlimited = x
    if ACT.limit is not None:
        x = tl.where(x > ACT.limit, ACT.limit, x)  # NaN stays
    if ACT.name == "silu":
        s = sigmoid(x)
        value = x * s
        slope = s + value * (1.0 - s)
    elif ACT.name == "gelu":
        density = 0.3989422804014327 * exp2(-0.7213475204444817 * x * x)
        cumulative = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
        value = x * cumulative
        slope = cumulative + x * density
    elif ACT.name == "gelu_tanh":
        inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        s = sigmoid(inner)
        value = x * s
        slope = s + value * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    elif ACT.name == "quick_gelu":
        s = sigmoid(1.702 * x)
        value = x * s
        slope = s + 1.702 * value * (1.0 - s)
    elif ACT.name == "relu":
        value = tl.maximum(x, 0.0)
        slope = tl.where(x > 0, 1.0, 0.0)
    else:
        tl.static_assert(ACT.name == "relu2", "no activation of this name")
        slope = 2.0 * tl.maximum(x, 0.0)
        value = 0.25 * slope * slope
    if ACT.limit is not None:
        slope = tl.where(unlimited > ACT.limit, 0.0, slope)
    return value, slope


@triton.jit
def limit_up(u, ACT: tl.constexpr):
    """u from -ACT.limit to ACT.limit if there is a limit."""
    if ACT.limit is not None:
        u = tl.where(u > ACT.limit, ACT.limit, tl.where(u < -ACT.limit, -ACT.limit, u))
    return u


@triton.jit
def store_maxima(maxima, bits, row, SIZE: tl.constexpr, TILES: tl.constexpr):
    """Stores the largest magnitude of every SIZE columns of a row; returns its bits."""
    bits = tl.reshape(bits, [TILES.height, TILES.width // SIZE, SIZE])
    largest = tl.max(bits, axis=2)
    offsets, mask = block_offsets(row, SIZE, TILES)
    tl.store(maxima + offsets, largest.to(tl.float32, bitcast=True), mask=mask)
    return largest


@triton.jit
def load_hidden(x, row_scale, column_scale, row, column, TILES: tl.constexpr):
    """Loads a tile of values, or of sums in INT32 times the scales of their rows and columns."""
    v = load_tile(x, row, column, TILES)
    if x.dtype.element_ty == tl.int32:
        rows = tl.load(row_scale + row, mask=row < TILES.rows, other=0.0)[:, None]
        columns = tl.load(column_scale + column, mask=column < TILES.columns, other=0.0)[None, :]
        # As `int8.Product.scaled`: the smaller scale first.
        v = v * tl.where(rows < columns, rows, columns) * tl.where(rows < columns, columns, rows)
    return v


@triton.jit
def activation_forward_tile(
    gate, up, first, within, gate_codes, gate_exponents, up_codes, up_exponents, maxima,
    ACT: tl.constexpr, F8: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Stores gate and up in blocks, and the maxima of their activation."""
    row, column = tile_indices(TILES)
    g = store_blocks(
        load_tile(gate, row, column, TILES),
        gate_codes, gate_exponents, row, column, first, within,
        ACT.stochastic, False, F8, TILES,
    )  # fmt: skip
    a, _ = activation(g, ACT)
    if ACT.gated:
        u = store_blocks(
            load_tile(up, row, column, TILES),
            up_codes, up_exponents, row, column, first, within,
            ACT.stochastic, True, F8, TILES,
        )  # fmt: skip
        a *= limit_up(u, ACT)
    store_maxima(maxima, magnitude_bits(a), row, ACT.per_maximum, TILES)


@triton.jit
def activation_cast_tile(
    gate_codes, gate_exponents, up_codes, up_exponents, scale, out,
    ACT: tl.constexpr, F8: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The activation of blocks as FP8 codes."""
    row, column = tile_indices(TILES)
    a, _ = activation(load_blocks(gate_codes, gate_exponents, row, column, TILES), ACT)
    if ACT.gated:
        a *= limit_up(load_blocks(up_codes, up_exponents, row, column, TILES), ACT)
    q = round_to_fp8(a * (1.0 / tl.load(scale)), F8).to(out.dtype.element_ty)
    store_tile(q, out, row, column, TILES)


@triton.jit
def activation_backward_weighted_tile(
    da, gate_codes, gate_exponents, up_codes, up_exponents, scale, first_scale, second_scale,
    input_rows, gradient_rows, columns, weights,
    recomputed, first, first_transposed, second, second_transposed, dots,
    ACT: tl.constexpr, F8: tl.constexpr, GRADIENT_F8: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The gradients of gate and up in both layouts, and a recomputed in the transposed one.

    If ACT.weighted, each row of da and of a counts `weights` times, and the sums of da a, without
    weights, over the columns of each tile are stored.
    """
    row, column = tile_indices(TILES)
    # Hides from Triton that more than 8 columns are contiguous: a thread then holds 8 neighbours;
    # it does not have the registers for 16.
    column = column // 8 * 8 + column % 8
    d = load_tile(da, row, column, TILES)
    g = load_blocks(gate_codes, gate_exponents, row, column, TILES)
    a, slope = activation(g, ACT)
    of_first, of_second = 1.0 / tl.load(first_scale), 1.0 / tl.load(second_scale)
    if ACT.weighted:
        weight = tl.load(weights + row, mask=row < TILES.rows, other=0.0)[:, None]
        of_first, of_second = weight * of_first, weight * of_second
    if ACT.gated:
        of_up = d * a
        if ACT.limit is not None:
            u = load_blocks(up_codes, up_exponents, row, column, TILES)
            of_up = tl.where(tl.abs(u) > ACT.limit, 0.0, of_up)
        q = round_tile(
            of_up * of_second, gradient_rows, columns, row, column,
            ACT.stochastic, GRADIENT_F8, TILES,
        )  # fmt: skip
        q = q.to(second.dtype.element_ty)
        store_tile(q, second, row, column, TILES)
        store_transposed(q, second_transposed, row, column, TILES)
        if ACT.limit is None:
            u = load_blocks(up_codes, up_exponents, row, column, TILES)
        u = limit_up(u, ACT)
        a *= u
        if ACT.weighted:
            offsets, mask = block_offsets(row, TILES.width, TILES)
            tl.store(dots + offsets, tl.sum(d * a, axis=1)[:, None], mask=mask)
        d *= u
    q = round_tile(
        d * slope * of_first, gradient_rows, columns, row, column,
        ACT.stochastic, GRADIENT_F8, TILES,
    )  # fmt: skip
    q = q.to(first.dtype.element_ty)
    store_tile(q, first, row, column, TILES)
    store_transposed(q, first_transposed, row, column, TILES)
    of_a = 1.0 / tl.load(scale)
    if ACT.weighted:
        of_a = weight * of_a
    q = round_tile(
        a * of_a, input_rows, columns, row, column,
        ACT.stochastic, F8, TILES,
    )  # fmt: skip
    store_transposed(q.to(recomputed.dtype.element_ty), recomputed, row, column, TILES)


@triton.jit
def activation_backward_tile(
    da, gate_codes, gate_exponents, up_codes, up_exponents, scale, first_scale, second_scale,
    input_rows, gradient_rows, columns,
    recomputed, first, first_transposed, second, second_transposed,
    ACT: tl.constexpr, F8: tl.constexpr, GRADIENT_F8: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The same without weights."""
    activation_backward_weighted_tile(
        da, gate_codes, gate_exponents, up_codes, up_exponents, scale, first_scale, second_scale,
        input_rows, gradient_rows, columns, da,
        recomputed, first, first_transposed, second, second_transposed, da,
        ACT, F8, GRADIENT_F8, TILES,
    )  # fmt: skip


@triton.jit
def activation_backward_ungated_tile(
    da, codes, exponents, codes_twice, exponents_twice, scale, gradient_scale, scale_twice,
    input_rows, gradient_rows, columns, recomputed, straight, transposed,
    ACT: tl.constexpr, F8: tl.constexpr, GRADIENT_F8: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The same without weights and without an up, and so with one gradient."""
    activation_backward_tile(
        da, codes, exponents, codes_twice, exponents_twice, scale, gradient_scale, scale_twice,
        input_rows, gradient_rows, columns, recomputed, straight, transposed, straight, transposed,
        ACT, F8, GRADIENT_F8, TILES,
    )  # fmt: skip


@triton.jit
def activation_forward_exact_tile(
    gate, up, row_scale, gate_scale, up_scale, first, within,
    gate_codes, gate_exponents, up_codes, up_exponents, out, maxima,
    ACT: tl.constexpr, F8: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Stores gate and up in blocks, the activation of their exact values, and its maxima.

    A maximum is over both the activations of the exact values and those of the decoded blocks. Gate
    and up may be unscaled INT8 products; otherwise the scales are not read.
    """
    row, column = tile_indices(TILES)
    v = load_hidden(gate, row_scale, gate_scale, row, column, TILES)
    a, _ = activation(v, ACT)
    v = store_blocks(
        v, gate_codes, gate_exponents, row, column, first, within,
        ACT.stochastic, False, F8, TILES,
    )  # fmt: skip
    a_rounded, _ = activation(v, ACT)
    if ACT.gated:
        v = load_hidden(up, row_scale, up_scale, row, column, TILES)
        a *= limit_up(v, ACT)
        v = store_blocks(
            v, up_codes, up_exponents, row, column, first, within,
            ACT.stochastic, True, F8, TILES,
        )  # fmt: skip
        a_rounded *= limit_up(v, ACT)
    bits = tl.maximum(magnitude_bits(a), magnitude_bits(a_rounded))
    largest = store_maxima(maxima, bits, row, ACT.per_maximum, TILES)
    a = tl.reshape(a, [TILES.height, TILES.width // ACT.per_maximum, ACT.per_maximum])
    if out.dtype.element_ty == tl.int8:
        a = round_to_int8(a, int8_scale(largest.to(tl.float32, bitcast=True))[:, :, None])
    elif out.dtype.element_ty.primitive_bitwidth == 8:
        a *= inverse_power(fitting_exponent(largest, F8))[:, :, None]
        a = round_to_fp8(a, F8)
    q = tl.reshape(a, [TILES.height, TILES.width])
    store_tile(q.to(out.dtype.element_ty), out, row, column, TILES)


@triton.jit
def activation_rescale_tile(
    codes, maxima, scale, out, F8: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    """Codes with a scale per row and block become codes with one scale."""
    row, column = tile_indices(TILES)
    q = load_tile(codes, row, column, TILES)
    offsets, mask = block_offsets(row, TILES.block, TILES)
    largest = tl.load(maxima + offsets, mask=mask, other=0.0)
    factor = power_of_two(fitting_exponent(magnitude_bits(largest), F8)) * (1.0 / tl.load(scale))
    q = tl.reshape(q, [TILES.height, TILES.width // TILES.block, TILES.block])
    q = round_to_fp8(tl.reshape(q * factor[:, :, None], [TILES.height, TILES.width]), F8)
    store_tile(q.to(out.dtype.element_ty), out, row, column, TILES)
