"""Attention of one new token to stored keys and values, for a part of the slots.

The last part has the token itself, too.

SPEC is an `attention_to_past.Spec`. Programs of one text and KV head follow each other. A program
computes for all G query heads of its KV head: several in the ROWS rows that a product on tensor
cores has, a single one by itself. Columns are in two halves, because a byte of INT4 has a column of
each.
"""

import triton
import triton.language as tl

from coat_jax.kernels.triton.arithmetic import FAST, exp2, log2
from coat_jax.kernels.triton.int4 import high_codes

NEVER = tl.constexpr(-1e30)  # a score; minus infinity would make a NaN of infinity minus infinity
PER_ONE = tl.constexpr(32768.0)  # with one query, an integer code b is the number 1 + b / PER_ONE


@triton.jit
def attend_to_past(
    q, keys, key_scale, key_zero, values, value_scale, value_zero, own_keys, own_key_scale,
    own_key_zero, own_values, own_value_scale, own_value_zero, layer, first, filled, out, log_sums,
    SPEC: tl.constexpr,
):  # fmt: skip
    """o of the visible slots in a part, in FP32, and the base-2 logarithm of the sum below it."""
    text_and_head, part = tl.program_id(0) // SPEC.parts, tl.program_id(0) % SPEC.parts
    stored = keys, key_scale, key_zero, values, value_scale, value_zero
    own = own_keys, own_key_scale, own_key_zero, own_values, own_value_scale, own_value_zero
    # A layer's cache may have more than 2^31 elements.
    at = (tl.load(layer) * SPEC.samples + text_and_head).to(tl.int64) * SPEC.slots
    stored, own = from_slot(stored, at, SPEC), from_slot(own, text_and_head, SPEC)
    begin, end = tl.load(first + text_and_head // SPEC.heads), tl.load(filled)
    # The blocks that have visible slots are divided among the parts.
    first_block, last_block = begin // SPEC.block, tl.cdiv(end, SPEC.block)
    share = tl.cdiv(tl.maximum(last_block - first_block, 0), SPEC.parts)
    first_block += part * share
    last_block = tl.minimum(first_block + share, last_block)
    if SPEC.group == 1:
        attend_with_one(q, stored, own, begin, end, first_block, last_block, out, log_sums, SPEC)
    else:
        attend_with_several(
            q, stored, own, begin, end, first_block, last_block, out, log_sums, SPEC
        )


@triton.jit
def from_slot(stored, at, SPEC: tl.constexpr):
    keys, key_scale, key_zero, values, value_scale, value_zero = stored
    first = at * (SPEC.width // 2 if SPEC.packed else SPEC.width)
    keys, values = keys + first, values + first
    return keys, key_scale + at, key_zero + at, values, value_scale + at, value_zero + at


# --- Several query heads ---------------------------------------------------------------------


@triton.jit
def attend_with_several(
    q, stored, own, begin, end, first_block, last_block, out, log_sums, SPEC: tl.constexpr
):
    text_and_head, part = tl.program_id(0) // SPEC.parts, tl.program_id(0) % SPEC.parts
    ROWS: tl.constexpr = SPEC.rows
    HALF: tl.constexpr = SPEC.width // 2
    g, h = tl.arange(0, ROWS), tl.arange(0, HALF)
    used = (g < SPEC.group)[:, None]
    where = (text_and_head * SPEC.group + g)[:, None] * SPEC.width + h[None, :]
    q_low = tl.load(q + where, mask=used, other=0.0)
    q_high = tl.load(q + where + HALF, mask=used, other=0.0)
    q_sum = tl.sum(q_low.to(tl.float32), axis=1) + tl.sum(q_high.to(tl.float32), axis=1)
    zeros = tl.zeros([ROWS], tl.float32)
    o = tl.zeros([ROWS, HALF], tl.float32)
    state = tl.full([ROWS], NEVER, tl.float32), zeros, zeros, o, o
    if part == SPEC.parts - 1:
        slot = tl.arange(0, SPEC.block)
        state = attend_to_block(state, q_low, q_high, q_sum, own, slot, slot < 1, SPEC)
    for block in range(first_block, last_block):
        slot = block * SPEC.block + tl.arange(0, SPEC.block)
        there = (slot >= begin) & (slot < end)
        state = attend_to_block(state, q_low, q_high, q_sum, stored, slot, there, SPEC)
    largest, total, zeros, o_low, o_high = state
    seen = total > 0
    per_total = 1.0 / tl.where(seen, total, 1.0)
    row = (text_and_head * SPEC.parts + part) * SPEC.group + g
    where = row[:, None] * SPEC.width + h[None, :]
    tl.store(out + where, (o_low + zeros[:, None]) * per_total[:, None], mask=used)
    tl.store(out + where + HALF, (o_high + zeros[:, None]) * per_total[:, None], mask=used)
    sums = tl.where(seen, largest + log2(total), NEVER)
    tl.store(log_sums + row, sums, mask=g < SPEC.group)


@triton.jit
def attend_to_block(state, q_low, q_high, q_sum, stored, slot, there, SPEC: tl.constexpr):
    """The state of a softmax after a block of slots: maxima, sums, sums of zeros, halves of o."""
    keys, key_scale, key_zero, values, value_scale, value_zero = stored
    largest, total, zeros, o_low, o_high = state
    dtype: tl.constexpr = q_low.dtype
    low, high = load_halves(keys, slot, there, dtype, SPEC)
    x = tl.dot(q_low, tl.trans(low), input_precision="ieee")
    x += tl.dot(q_high, tl.trans(high), input_precision="ieee")
    if SPEC.scaled:
        x *= tl.load(key_scale + slot, mask=there, other=0.0).to(tl.float32)[None, :]
    if SPEC.packed:
        zero = tl.load(key_zero + slot, mask=there, other=0.0).to(tl.float32)
        x += q_sum[:, None] * zero[None, :]
    x = tl.where(there[None, :], x * SPEC.factor, NEVER)
    larger = tl.maximum(largest, tl.max(x, axis=1))
    p = exp2(x - larger[:, None])
    shrink = exp2(largest - larger)
    total = total * shrink + tl.sum(p, axis=1)
    if SPEC.packed:
        zero = tl.load(value_zero + slot, mask=there, other=0.0).to(tl.float32)
        zeros = zeros * shrink + tl.sum(p * zero[None, :], axis=1)
    if SPEC.scaled:
        p *= tl.load(value_scale + slot, mask=there, other=0.0).to(tl.float32)[None, :]
    p = p.to(dtype)
    low, high = load_halves(values, slot, there, dtype, SPEC)
    o_low = o_low * shrink[:, None] + tl.dot(p, low, input_precision="ieee")
    o_high = o_high * shrink[:, None] + tl.dot(p, high, input_precision="ieee")
    return larger, total, zeros, o_low, o_high


@triton.jit
def load_halves(codes, row, there, dtype: tl.constexpr, SPEC: tl.constexpr):
    """The codes of slots, [slots, H / 2] each, in a dtype that has them all."""
    HALF: tl.constexpr = SPEC.width // 2
    h = tl.arange(0, HALF)
    if SPEC.packed:
        both = tl.load(codes + row[:, None] * HALF + h[None, :], mask=there[:, None], other=0)
        low, high = both & 15, both >> 4
    else:
        where = row[:, None] * SPEC.width + h[None, :]
        low = tl.load(codes + where, mask=there[:, None], other=0.0)
        high = tl.load(codes + where + HALF, mask=there[:, None], other=0.0)
    return low.to(dtype), high.to(dtype)


# --- One query head --------------------------------------------------------------------------


@triton.jit
def attend_with_one(
    q, stored, own, begin, end, first_block, last_block, out, log_sums, SPEC: tl.constexpr
):
    """Each slot of a quarter of a block has a softmax of its own: the loop sums over no slots."""
    HALF: tl.constexpr = SPEC.width // 2
    STORED: tl.constexpr = HALF if SPEC.packed else SPEC.width
    ROWS: tl.constexpr = SPEC.block // 4
    text_and_head, part = tl.program_id(0) // SPEC.parts, tl.program_id(0) % SPEC.parts
    query = query_of(q + text_and_head * SPEC.width, SPEC)
    zeros = tl.zeros([ROWS], tl.float32)
    o = tl.zeros([ROWS, STORED], tl.float32)
    state = tl.full([ROWS], NEVER, tl.float32), zeros, zeros, o, o
    # Scales are too short for Triton to load early, so they come one block before their codes.
    slot = first_block * SPEC.block + tl.arange(0, ROWS)
    numbers = numbers_of_four(stored, slot, begin, end, SPEC)
    if part == SPEC.parts - 1:
        only = tl.arange(0, ROWS)
        of_own = numbers_of_four(own, only, 0, 1, SPEC)
        state = attend_to_four(state, query, own, only, 0, 1, of_own, SPEC)
    for block in tl.range(first_block, last_block, num_stages=SPEC.stages):
        slot = block * SPEC.block + tl.arange(0, ROWS)
        later = numbers_of_four(stored, slot + SPEC.block, begin, end, SPEC)
        state = attend_to_four(state, query, stored, slot, begin, end, numbers, SPEC)
        numbers = later
    largest, total, zeros, o_low, o_high = state
    top = tl.max(largest, axis=0)
    weight = exp2(largest - top)
    total = tl.sum(total * weight, axis=0)
    zero = tl.sum(zeros * weight, axis=0)
    seen = total > 0
    per_total = 1.0 / tl.where(seen, total, 1.0)
    if SPEC.integers:
        zero /= PER_ONE
        per_total *= PER_ONE
    where = out + tl.program_id(0) * SPEC.width + tl.arange(0, STORED)
    tl.store(where, (tl.sum(o_low * weight[:, None], axis=0) + zero) * per_total)
    if SPEC.packed:
        tl.store(where + HALF, (tl.sum(o_high * weight[:, None], axis=0) + zero) * per_total)
    tl.store(log_sums + tl.program_id(0), tl.where(seen, top + log2(total), NEVER))


@triton.jit
def attend_to_four(state, query, stored, slot, begin, end, numbers, SPEC: tl.constexpr):
    """The states of softmaxes after four slots of each: see `attend_to_block`."""
    largest, total, zeros, o_low, o_high = state
    ROWS: tl.constexpr = SPEC.block // 4
    x_0, v_0 = score(query, stored, slot, begin, end, numbers[0], SPEC)
    x_1, v_1 = score(query, stored, slot + ROWS, begin, end, numbers[1], SPEC)
    x_2, v_2 = score(query, stored, slot + 2 * ROWS, begin, end, numbers[2], SPEC)
    x_3, v_3 = score(query, stored, slot + 3 * ROWS, begin, end, numbers[3], SPEC)
    x, v = (x_0, x_1, x_2, x_3), (v_0, v_1, v_2, v_3)
    larger = tl.maximum(tl.maximum(x_0, x_1), tl.maximum(x_2, x_3))
    larger = tl.maximum(largest, larger)
    shrink = exp2(largest - larger)
    total *= shrink
    zeros *= shrink
    weights = tl.zeros_like(total)
    low = tl.zeros_like(o_low)
    high = tl.zeros_like(o_high)
    for i in tl.static_range(4):
        p = tl.where(x[i] > NEVER, exp2(x[i] - larger), 0.0)
        total += p
        if SPEC.packed:
            zeros += p * numbers[i][3].to(tl.float32)
        if SPEC.scaled:
            p *= numbers[i][1].to(tl.float32)
        weights += p
        low += p[:, None] * low_numbers(v[i])
        if SPEC.packed:
            high += p[:, None] * high_numbers(v[i])
    if SPEC.integers:
        # Now: the sums over all blocks would be so large that they lose digits of the codes.
        offset = weights * (1.0 if SPEC.packed else 1.0 + 128 / PER_ONE)
        low -= offset[:, None]
        high -= offset[:, None]
    o_low = o_low * shrink[:, None] + low
    if SPEC.packed:
        o_high = o_high * shrink[:, None] + high
    return larger, total, zeros, o_low, o_high


@triton.jit
def numbers_of_four(stored, slot, begin, end, SPEC: tl.constexpr):
    """`numbers_of_slots` of each quarter of a block."""
    ROWS: tl.constexpr = SPEC.block // 4
    return (
        numbers_of_slots(stored, slot, begin, end, SPEC),
        numbers_of_slots(stored, slot + ROWS, begin, end, SPEC),
        numbers_of_slots(stored, slot + 2 * ROWS, begin, end, SPEC),
        numbers_of_slots(stored, slot + 3 * ROWS, begin, end, SPEC),
    )


@triton.jit
def numbers_of_slots(stored, slot, begin, end, SPEC: tl.constexpr):
    """The scales of keys and values, and their zeros, as far as the format has them."""
    _, key_scale, key_zero, _, value_scale, value_zero = stored
    there = (slot >= begin) & (slot < end)
    if SPEC.packed:
        key_zeros = tl.load(key_zero + slot, mask=there, other=0.0)
        value_zeros = tl.load(value_zero + slot, mask=there, other=0.0)
    else:
        key_zeros, value_zeros = slot, slot
    if SPEC.scaled:
        key_scales = tl.load(key_scale + slot, mask=there, other=0.0)
        value_scales = tl.load(value_scale + slot, mask=there, other=0.0)
    else:
        key_scales, value_scales = slot, slot
    return key_scales, value_scales, key_zeros, value_zeros


@triton.jit
def query_of(q, SPEC: tl.constexpr):
    """What `score` needs of q: its columns for low and high codes, its sum, and a factor of both.

    In integers of 16 bits, if SPEC.integers: a rounding error of 2^-16 of the largest, far below
    that of BF16. Words have the high bytes of four, which are signed, and their low bytes.
    """
    STORED: tl.constexpr = SPEC.width // 2 if SPEC.packed else SPEC.width
    h = tl.arange(0, STORED)
    low = tl.load(q + h).to(tl.float32)
    high = tl.load(q + SPEC.width - STORED + h).to(tl.float32)
    q_sum = tl.sum(low + high, axis=0)
    unit = 1.0
    if SPEC.integers:
        largest = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), axis=0)
        # A maximum passes NaN over, a sum does not.
        unit = tl.maximum(largest, 1e-30) / 32512 + 0.0 * q_sum
        low = words_of(q, 1.0 / unit, SPEC)
        high = words_of(q + SPEC.width - STORED, 1.0 / unit, SPEC)
    return low, high, q_sum, unit


@triton.jit
def words_of(q, per_unit, SPEC: tl.constexpr):
    WORDS: tl.constexpr = SPEC.width // 8 if SPEC.packed else SPEC.width // 4
    first = q + 4 * tl.arange(0, WORDS)
    high, low = tl.zeros([WORDS], tl.int32), tl.zeros([WORDS], tl.int32)
    for i in tl.static_range(4):
        x = tl.floor(tl.load(first + i).to(tl.float32) * per_unit + 0.5).to(tl.int32)
        high |= ((x >> 8) & 255) << (8 * i)
        low |= (x & 255) << (8 * i)
    return high, low


@triton.jit
def score(query, stored, slot, begin, end, numbers, SPEC: tl.constexpr):
    """Scores of slots, and the codes of their values."""
    keys, _, _, values, _, _ = stored
    q_low, q_high, q_sum, unit = query
    STORED: tl.constexpr = SPEC.width // 2 if SPEC.packed else SPEC.width
    NOTHING: tl.constexpr = 0 if SPEC.integers else 0.0
    there = (slot >= begin) & (slot < end)
    where = slot[:, None] * STORED + tl.arange(0, STORED)[None, :]
    v = tl.load(values + where, mask=there[:, None], other=NOTHING)
    if SPEC.integers:
        WORDS: tl.constexpr = STORED // 4
        where = slot[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
        k = tl.load(keys.to(tl.pointer_type(tl.int32)) + where, mask=there[:, None], other=0)
        if SPEC.packed:
            x = product_of_words(k & 0x0F0F0F0F, q_low)
            x += product_of_words((k >> 4) & 0x0F0F0F0F, q_high)
        else:
            x = product_of_words(k, q_low)
        x = tl.sum(x, axis=1).to(tl.float32) * unit
    else:
        k = tl.load(keys + where, mask=there[:, None], other=NOTHING)
        x = tl.sum(k.to(tl.float32) * q_low[None, :], axis=1)
    if SPEC.scaled:
        x *= numbers[0].to(tl.float32)
    if SPEC.packed:
        x += q_sum * numbers[2].to(tl.float32)
    return tl.where(there, x * SPEC.factor, NEVER), v


@triton.jit
def product_of_words(k, q):
    """The sums of the products of four bytes k, signed, and four integers of 16 bits."""
    high, low = q[0][None, :], q[1][None, :]
    if FAST:
        return tl.inline_asm_elementwise(
            """{.reg .s32 t; dp4a.s32.s32 t, $1, $2, 0; shl.b32 t, t, 8;
            dp4a.s32.u32 $0, $1, $3, t;}""",
            "=r,r,r,r", [k, high, low], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    total = tl.zeros_like(k)
    for i in tl.static_range(4):
        q_i = (((high << (24 - 8 * i)) >> 24) << 8) + ((low >> (8 * i)) & 255)
        total += ((k << (24 - 8 * i)) >> 24) * q_i
    return total


@triton.jit
def low_numbers(codes):
    """Codes in FP32, `near_one` if they are integers; of two in a byte, the low ones."""
    if codes.dtype == tl.int8:
        return near_one(codes.to(tl.uint8, bitcast=True) ^ 128)
    if codes.dtype == tl.uint8:
        return near_one(codes & 15)
    return codes.to(tl.float32)


@triton.jit
def high_numbers(codes):
    """The high codes of two in a byte, as `low_numbers` has the low ones."""
    return near_one(high_codes(codes))


@triton.jit
def near_one(b):
    """1 + b / PER_ONE of bytes in FP32: one instruction, where Triton's conversion takes three."""
    if FAST:
        return tl.inline_asm_elementwise(
            """prmt.b32 $0, $4, 0x3F800000, 0x7604; prmt.b32 $1, $4, 0x3F800000, 0x7614;
            prmt.b32 $2, $4, 0x3F800000, 0x7624; prmt.b32 $3, $4, 0x3F800000, 0x7634;""",
            "=f,=f,=f,=f,r", [b], dtype=tl.float32, is_pure=True, pack=4,
        )  # fmt: skip
    return 1.0 + b.to(tl.float32) / PER_ONE
