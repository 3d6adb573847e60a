"""Between products of few rows: see `kernels.few_rows`.

A program has one row, ROW being a `few_rows.Row`, or one head of a row, HEADS being a
`few_rows.Heads`. Products come in parts, which it adds up. What is rounded is in FP32.
"""

import triton
import triton.language as tl

from coat_jax.kernels.triton.activation import activation, limit_up
from coat_jax.kernels.triton.arithmetic import exp2
from coat_jax.kernels.triton.blocks import magnitude_bits
from coat_jax.kernels.triton.formats import round_to_bf16, round_to_fp8, through_fp8
from coat_jax.kernels.triton.int8 import finite_or_nan, scale_of, to_int8
from coat_jax.kernels.triton.norm import normalize_row

GROUP = tl.constexpr(128)


@triton.jit
def normalize_and_round_row(
    x, scale, shift, codes, row_scale, sums, counts, NORM: tl.constexpr, ROW: tl.constexpr,
    F8: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, ROW.width)
    where = x + tl.program_id(0) * ROW.columns + column
    v = tl.load(where, mask=column < ROW.columns, other=0.0).to(tl.float32)
    if NORM is not None:
        v, _, _ = normalize_row(v, scale, shift, column, NORM)
        v = tl.where(column < ROW.columns, v, 0.0)
    round_row(v, codes, row_scale, sums, counts, ROW, F8)


@triton.jit
def activate_and_round_row(
    gate, up, product_scale, codes, row_scale, sums, counts, ACT: tl.constexpr, ROW: tl.constexpr,
    F8: tl.constexpr,
):  # fmt: skip
    scale = tl.load(product_scale + tl.program_id(0))
    a, _ = activation(scale * add_parts(gate, ROW), ACT)
    v = a * limit_up(scale * add_parts(up, ROW), ACT)
    round_row(v, codes, row_scale, sums, counts, ROW, F8)


@triton.jit
def combine_and_round_row(
    o, log_sums, codes, row_scale, sums, counts, HEADS: tl.constexpr, ROW: tl.constexpr,
    F8: tl.constexpr,
):  # fmt: skip
    """A row of attention: the mean of its parts, each weighted by its sum of exponentials."""
    WIDTH: tl.constexpr = HEADS.width
    COLUMNS: tl.constexpr = ROW.width
    ROUNDED: tl.constexpr = COLUMNS // WIDTH  # heads, a power of two
    GROUPED: tl.constexpr = HEADS.heads // HEADS.kv_heads
    n, h = tl.arange(0, ROUNDED), tl.arange(0, WIDTH)
    there = n < HEADS.heads
    kv_head = tl.program_id(0) * HEADS.kv_heads + n // GROUPED
    first = kv_head * HEADS.parts * GROUPED + n % GROUPED
    PARTS: tl.constexpr = triton.next_power_of_2(HEADS.parts)
    part = tl.arange(0, PARTS)[:, None]
    of_all = log_sums + first[None, :] + part * GROUPED
    all_sums = tl.load(of_all, mask=(part < HEADS.parts) & there[None, :], other=-1e30)
    largest = tl.max(all_sums, axis=0)
    total = tl.sum(exp2(all_sums - largest[None, :]), axis=0)
    weighted = tl.zeros([ROUNDED, WIDTH], tl.float32)
    # With several loads under way: there are too few rows to hide one behind another.
    for part in tl.range(HEADS.parts, num_stages=4):
        head = first + part * GROUPED
        weight = exp2(tl.load(log_sums + head, mask=there, other=-1e30) - largest)
        where = o + head[:, None] * WIDTH + h[None, :]
        weighted += weight[:, None] * tl.load(where, mask=there[:, None], other=0.0)
    v = tl.reshape(weighted / total[:, None], [COLUMNS])
    round_row(v, codes, row_scale, sums, counts, ROW, F8)


@triton.jit
def add_parts(parts, ROW: tl.constexpr):
    """A row of a product, but for its scale."""
    WIDTH: tl.constexpr = ROW.width
    column = tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.float32)
    PARTS: tl.constexpr = ROW.parts
    for part in tl.static_range(PARTS):
        where = parts + (part * ROW.rows + tl.program_id(0)) * ROW.columns + column
        total += tl.load(where, mask=column < ROW.columns, other=0.0)
    return total


@triton.jit
def round_row(v, codes, row_scale, sums, counts, ROW: tl.constexpr, F8: tl.constexpr):
    """Stores the codes of a row with zeros past its end, its scale, and the sums of its groups.

    The first row also sets the counts of the product that follows to 0.
    """
    GROUPS: tl.constexpr = ROW.width // GROUP
    row, column = tl.program_id(0), tl.arange(0, ROW.width)
    top = finite_or_nan(tl.max(magnitude_bits(v), axis=0).to(tl.float32, bitcast=True))
    scale = scale_of(top, 448.0)
    tl.store(row_scale + row, scale)
    v = round_to_fp8(v * (1.0 / scale), F8)
    dtype: tl.constexpr = codes.dtype.element_ty
    tl.store(codes + row * ROW.columns + column, v.to(dtype), mask=column < ROW.columns)
    group = tl.arange(0, GROUPS)
    of_group = tl.sum(tl.reshape(through_fp8(v, dtype), [GROUPS, GROUP]), axis=1)
    used: tl.constexpr = ROW.columns // GROUP
    tl.store(sums + group * ROW.rows + row, of_group / 64, mask=group < used)
    COUNTS: tl.constexpr = ROW.counts
    tl.store(counts + tl.arange(0, COUNTS), tl.zeros([COUNTS], tl.int32), mask=row == 0)


@triton.jit
def store_head(
    q_parts, k_parts, v_parts, product_scale, cos, sin, q, keys, key_scale, key_zero, values,
    value_scale, value_zero, HEADS: tl.constexpr, F8: tl.constexpr,
):  # fmt: skip
    """One head of a row: a query or a key, rotated, or a value."""
    of_row: tl.constexpr = HEADS.heads + 2 * HEADS.kv_heads
    row, head = tl.program_id(0) // of_row, tl.program_id(0) % of_row
    HALF: tl.constexpr = HEADS.width // 2
    h = tl.arange(0, HALF)
    scale = tl.load(product_scale + row)
    c, s = tl.load(cos + row * HALF + h), tl.load(sin + row * HALF + h)
    if head < HEADS.heads:
        a, b = add_head(q_parts, scale, row, head, HEADS.heads, HEADS)
        where = q + (row * HEADS.heads + head) * HEADS.width + h
        tl.store(where, (a * c - b * s).to(q.dtype.element_ty))
        tl.store(where + HALF, (b * c + a * s).to(q.dtype.element_ty))
    elif head < HEADS.heads + HEADS.kv_heads:
        head -= HEADS.heads
        a, b = add_head(k_parts, scale, row, head, HEADS.kv_heads, HEADS)
        number = row * HEADS.kv_heads + head
        low, high = a * c - b * s, b * c + a * s
        encode_head(low, high, keys, key_scale, key_zero, number, HEADS, F8)
    else:
        head -= HEADS.heads + HEADS.kv_heads
        low, high = add_head(v_parts, scale, row, head, HEADS.kv_heads, HEADS)
        number = row * HEADS.kv_heads + head
        encode_head(low, high, values, value_scale, value_zero, number, HEADS, F8)


@triton.jit
def add_head(parts, scale, row, head, OF_ROW: tl.constexpr, HEADS: tl.constexpr):
    """The halves of a head in a product."""
    HALF: tl.constexpr = HEADS.width // 2
    h = tl.arange(0, HALF)
    PARTS: tl.constexpr = HEADS.parts
    low, high = tl.zeros([HALF], tl.float32), tl.zeros([HALF], tl.float32)
    for part in tl.static_range(PARTS):
        where = parts + ((part * HEADS.rows + row) * OF_ROW + head) * HEADS.width + h
        low += tl.load(where)
        high += tl.load(where + HALF)
    return low * scale, high * scale


@triton.jit
def encode_head(low, high, codes, scale, zero, head, HEADS: tl.constexpr, F8: tl.constexpr):
    """`cache_formats.encode_heads` of one head, given as halves."""
    HALF: tl.constexpr = HEADS.width // 2
    dtype: tl.constexpr = codes.dtype.element_ty
    h = tl.arange(0, HALF)
    bits = tl.maximum(tl.max(magnitude_bits(low), axis=0), tl.max(magnitude_bits(high), axis=0))
    top = bits.to(tl.float32, bitcast=True)
    if HEADS.format == "int4":
        least = tl.minimum(tl.min(low, axis=0), tl.min(high, axis=0)) + 0.0 * top  # keeps a NaN
        zero_point = round_to_bf16(least)
        least = zero_point.to(tl.float32)
        span = tl.maximum(tl.max(low, axis=0), tl.max(high, axis=0)) - least
        # BF16 may have rounded the zero point up to the largest number.
        rounded = round_to_bf16(scale_of(tl.where(span < 0.0, 0.0, span), 15.0))
        step = rounded.to(tl.float32)
        low, high = four_bits((low - least) / step), four_bits((high - least) / step)
        tl.store(codes + head * HALF + h, (low | high << 4).to(tl.uint8))
        tl.store(zero + head, zero_point)
        tl.store(scale + head, rounded)
    else:
        if HEADS.format != "none":
            most: tl.constexpr = 127.0 if HEADS.format == "int8" else 448.0
            step = round_to_bf16(scale_of(top, most))
            tl.store(scale + head, step)
            low, high = low / step.to(tl.float32), high / step.to(tl.float32)
        if HEADS.format == "int8":
            low, high = to_int8(low), to_int8(high)
        elif HEADS.format == "fp8":
            low, high = round_to_fp8(low, F8), round_to_fp8(high, F8)
        tl.store(codes + head * HEADS.width + h, low.to(dtype))
        tl.store(codes + head * HEADS.width + HALF + h, high.to(dtype))


@triton.jit
def four_bits(x):
    """Whole numbers, 0 .. 15; ties to even."""
    x = tl.minimum(tl.maximum(x, 0.0), 15.0)
    return (x + 8388608.0).to(tl.int32, bitcast=True) & 15
