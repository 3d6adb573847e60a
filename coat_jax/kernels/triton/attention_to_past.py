"""Attention of one new token to stored keys and values, for a part of the slots.

SPEC is an `attention_to_past.Spec`. Programs of one text and KV head follow each other. A program
computes for all G query heads of its KV head, in the ROWS rows that a product on tensor cores has.
Columns are in two halves, because a byte of INT4 has a column of each.
"""

import triton
import triton.language as tl

from coat_jax.kernels.triton.arithmetic import exp2, log2

NEVER = tl.constexpr(-1e30)  # a score; minus infinity would make a NaN of infinity minus infinity


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


@triton.jit
def attend_to_block(
    state, q_low, q_high, q_sum, keys, key_scale, key_zero, values, value_scale, value_zero, slot,
    there, SPEC: tl.constexpr,
):  # fmt: skip
    """The state of a softmax after a block of slots: maxima, sums, sums of zeros, halves of o."""
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
def attend_to_past(
    q, keys, key_scale, key_zero, values, value_scale, value_zero, own_keys, own_key_scale,
    own_key_zero, own_values, own_value_scale, own_value_zero, layer, first, filled, out, log_sums,
    SPEC: tl.constexpr,
):  # fmt: skip
    """o of the visible slots in a part, in FP32, and the base-2 logarithm of the sum below it.

    The first part also has the new token itself.
    """
    program = tl.program_id(0)
    part, text_and_head = program % SPEC.parts, program // SPEC.parts
    ROWS: tl.constexpr = SPEC.rows
    HALF: tl.constexpr = SPEC.width // 2
    STORED: tl.constexpr = HALF if SPEC.packed else SPEC.width
    g, h = tl.arange(0, ROWS), tl.arange(0, HALF)
    used = (g < SPEC.group)[:, None]
    row_of_q = text_and_head * SPEC.group + g
    where = row_of_q[:, None] * SPEC.width + h[None, :]
    q_low = tl.load(q + where, mask=used, other=0.0)
    q_high = tl.load(q + where + HALF, mask=used, other=0.0)
    q_sum = tl.sum(q_low.to(tl.float32), axis=1) + tl.sum(q_high.to(tl.float32), axis=1)
    # A layer's cache may have more than 2^31 elements.
    start = (tl.load(layer) * SPEC.samples + text_and_head).to(tl.int64) * SPEC.slots
    begin, end = tl.load(first + text_and_head // SPEC.heads), tl.load(filled)
    # The blocks that have visible slots are divided among the parts.
    first_block = begin // SPEC.block
    blocks = tl.cdiv(end, SPEC.block)
    share = tl.cdiv(tl.maximum(blocks - first_block, 0), SPEC.parts)
    first_block += part * share
    zeros = tl.zeros([ROWS], tl.float32)
    o = tl.zeros([ROWS, HALF], tl.float32)
    state = tl.full([ROWS], NEVER, tl.float32), zeros, zeros, o, o
    in_block = tl.arange(0, SPEC.block)
    for block in range(first_block, tl.minimum(first_block + share, blocks)):
        slot = block * SPEC.block + in_block
        state = attend_to_block(
            state, q_low, q_high, q_sum, keys + start * STORED, key_scale + start, key_zero + start,
            values + start * STORED, value_scale + start, value_zero + start, slot,
            (slot >= begin) & (slot < end), SPEC,
        )  # fmt: skip
    if part == 0:
        own = text_and_head * STORED
        state = attend_to_block(
            state, q_low, q_high, q_sum, own_keys + own, own_key_scale + text_and_head,
            own_key_zero + text_and_head, own_values + own, own_value_scale + text_and_head,
            own_value_zero + text_and_head, in_block, in_block == 0, SPEC,
        )  # fmt: skip
    largest, total, zeros, o_low, o_high = state
    seen = total > 0
    per_total = 1.0 / tl.where(seen, total, 1.0)
    row = (text_and_head * SPEC.parts + part) * SPEC.group + g
    where = row[:, None] * SPEC.width + h[None, :]
    tl.store(out + where, (o_low + zeros[:, None]) * per_total[:, None], mask=used)
    tl.store(out + where + HALF, (o_high + zeros[:, None]) * per_total[:, None], mask=used)
    sums = tl.where(seen, largest + log2(total), NEVER)
    tl.store(log_sums + row, sums, mask=g < SPEC.group)
