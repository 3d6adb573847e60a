"""Attention between tiles of tokens, forward and backward.

SPEC is a `tile_attention.Spec`. Inside, arrays have rows [B, N, rows, H]: those of a tile follow
each other, its tokens first, then empty ones. Outside, they are [B, S, N, H], and `rows` has the
token of each row. Programs of one sample and head follow each other, since they share keys.
"""

import triton
import triton.language as tl

from coat_jax.kernels.triton.arithmetic import FAST, exp2, log2
from coat_jax.kernels.triton.formats import round_to_fp8

NEVER = tl.constexpr(-1e30)  # a score; minus infinity would make a NaN of infinity minus infinity


@triton.jit
def numbers_of(SIZE: tl.constexpr, SPEC: tl.constexpr):
    """This program's block of SIZE rows, its sample (of B x N), and the batch and head of that."""
    blocks: tl.constexpr = SPEC.tiles * SPEC.slots // SIZE
    program = tl.program_id(0)
    sample = program // blocks
    return program % blocks, sample, sample // SPEC.heads, sample % SPEC.heads


@triton.jit
def entry_of(level, batch, head, tile, SPEC: tl.constexpr):
    """The number of a tile's list."""
    if SPEC.list_heads == 1:
        head = 0
    return (tl.load(level + batch) * SPEC.list_heads + head) * SPEC.tiles + tile


@triton.jit
def outside(token, batch, head, SPEC: tl.constexpr):
    """Offsets of tokens' heads in an array [B, S, N, H]."""
    h = tl.arange(0, SPEC.width)
    rows = (batch * SPEC.tiles * SPEC.tokens + token).to(tl.int64) * SPEC.heads + head
    return rows[:, None] * SPEC.width + h[None, :]


@triton.jit
def inside(row, sample, SPEC: tl.constexpr):
    """Offsets of rows in an array [B, N, rows, H]."""
    h = tl.arange(0, SPEC.width)
    first = sample.to(tl.int64) * (SPEC.tiles * SPEC.slots * SPEC.width)
    return first + row[:, None] * SPEC.width + h[None, :]


@triton.jit
def gather_tile(
    x, rows, mean, scale, out, transposed,
    ROUND: tl.constexpr, TRANSPOSE: tl.constexpr, F8: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Rows of tiles from an array of tokens; if ROUND, (x - mean) / scale as FP8 codes."""
    block, sample, batch, head = numbers_of(SPEC.queries, SPEC)
    row = block * SPEC.queries + tl.arange(0, SPEC.queries)
    token = tl.load(rows + row)
    there = (token >= 0)[:, None]
    v = tl.load(x + outside(token, batch, head, SPEC), mask=there, other=0.0)
    if ROUND:
        h = tl.arange(0, SPEC.width)
        v = v.to(tl.float32) - tl.load(mean + sample * SPEC.width + h)[None, :]
        v = round_to_fp8(tl.where(there, v, 0.0) * (1.0 / tl.load(scale)), F8)
    v = v.to(out.dtype.element_ty)
    tl.store(out + inside(row, sample, SPEC), v)
    if TRANSPOSE:
        h = tl.arange(0, SPEC.width)
        length: tl.constexpr = SPEC.tiles * SPEC.slots
        first = sample.to(tl.int64) * (length * SPEC.width)
        tl.store(transposed + first + h[:, None] * length + row[None, :], tl.trans(v))


@triton.jit
def gather_gradient_tile(do, o, rows, out, delta, SPEC: tl.constexpr):
    """Rows of tiles of o's gradient, and its dot product with o for each."""
    block, sample, batch, head = numbers_of(SPEC.queries, SPEC)
    row = block * SPEC.queries + tl.arange(0, SPEC.queries)
    token = tl.load(rows + row)
    where = outside(token, batch, head, SPEC)
    there = (token >= 0)[:, None]
    d = tl.load(do + where, mask=there, other=0.0)
    own = tl.load(o + where, mask=there, other=0.0)
    tl.store(out + inside(row, sample, SPEC), d.to(out.dtype.element_ty))
    dots = tl.sum(d.to(tl.float32) * own.to(tl.float32), axis=1)
    tl.store(delta + sample * (SPEC.tiles * SPEC.slots) + row, dots)


@triton.jit
def forward_tile(
    q, k, v, factor, value_scale, rows, keys, counts, level, out, log_sums,
    FP8: tl.constexpr, F8: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """o and the base-2 logarithm of each row's sum, for a block of queries.

    v is [B, N, H, rows] if FP8: Hopper multiplies FP8 only along contiguous rows.
    """
    block, sample, batch, head = numbers_of(SPEC.queries, SPEC)
    entry = entry_of(level, batch, head, block * SPEC.queries // SPEC.slots, SPEC)
    length: tl.constexpr = SPEC.tiles * SPEC.slots
    parts: tl.constexpr = SPEC.slots // SPEC.keys
    row = block * SPEC.queries + tl.arange(0, SPEC.queries)
    h = tl.arange(0, SPEC.width)
    first = sample.to(tl.int64) * (length * SPEC.width)
    queries = tl.load(q + inside(row, sample, SPEC))
    to_log2 = tl.load(factor)
    # p is up to 2^8 where it is rounded to FP8, which ends at 448.
    lift: tl.constexpr = 8.0 if FP8 else 0.0
    HEIGHT: tl.constexpr = SPEC.queries
    WIDTH: tl.constexpr = SPEC.width
    largest = tl.full([HEIGHT], NEVER, tl.float32)
    total = tl.zeros([HEIGHT], tl.float32)
    o = tl.zeros([HEIGHT, WIDTH], tl.float32)
    for i in range(tl.load(counts + entry) * parts):
        tile = tl.load(keys + entry * SPEC.most + i // parts)
        slot = i % parts * SPEC.keys + tl.arange(0, SPEC.keys)
        key = tile * SPEC.slots + slot
        x = tl.dot(queries, tl.load(k + first + key[None, :] * SPEC.width + h[:, None])) * to_log2
        if SPEC.tokens < SPEC.slots:
            x = tl.where((slot < SPEC.tokens)[None, :], x, NEVER)
        larger = tl.maximum(largest, tl.max(x, axis=1))
        p = exp2(x - (larger - lift)[:, None])
        shrink = exp2(largest - larger)
        total = total * shrink + tl.sum(p, axis=1)
        largest = larger
        if FP8:
            values = tl.load(v + first + h[None, :] * length + key[:, None])
        else:
            values = tl.load(v + first + key[:, None] * SPEC.width + h[None, :])
        if FP8 and not FAST:  # the interpreter's conversion does not round to nearest
            p = round_to_fp8(p, F8)
        # As a sum of its own: otherwise Triton adds it in the tensor core, in 14 bits.
        o = o * shrink[:, None] + tl.dot(p.to(v.dtype.element_ty), values)
    o = o * (tl.load(value_scale) / total)[:, None]
    token = tl.load(rows + row)
    there = token >= 0
    where = outside(token, batch, head, SPEC)
    tl.store(out + where, o.to(out.dtype.element_ty), mask=there[:, None])
    # Nothing attends from an empty row: 2^(x - infinity) is 0.
    sums = tl.where(there, largest - lift + log2(total), float("inf"))
    tl.store(log_sums + sample * length + row, sums)


@triton.jit
def query_gradient_tile(
    q, k, v, do, delta, log_sums, factor, value_scale, query_factor, rows, keys, counts, level, dq,
    SPEC: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of queries."""
    block, sample, batch, head = numbers_of(SPEC.queries, SPEC)
    entry = entry_of(level, batch, head, block * SPEC.queries // SPEC.slots, SPEC)
    length: tl.constexpr = SPEC.tiles * SPEC.slots
    parts: tl.constexpr = SPEC.slots // SPEC.keys
    row = block * SPEC.queries + tl.arange(0, SPEC.queries)
    h = tl.arange(0, SPEC.width)
    first = sample.to(tl.int64) * (length * SPEC.width)
    queries = tl.load(q + inside(row, sample, SPEC))
    d_out = tl.load(do + inside(row, sample, SPEC))
    sums = tl.load(log_sums + sample * length + row)
    dots = tl.load(delta + sample * length + row)
    to_log2, of_values = tl.load(factor), tl.load(value_scale)
    HEIGHT: tl.constexpr = SPEC.queries
    WIDTH: tl.constexpr = SPEC.width
    gradient = tl.zeros([HEIGHT, WIDTH], tl.float32)
    for i in range(tl.load(counts + entry) * parts):
        tile = tl.load(keys + entry * SPEC.most + i // parts)
        slot = i % parts * SPEC.keys + tl.arange(0, SPEC.keys)
        key = tile * SPEC.slots + slot
        across = first + key[None, :] * SPEC.width + h[:, None]
        keys_t = tl.load(k + across)
        p = exp2(tl.dot(queries, keys_t) * to_log2 - sums[:, None])
        if SPEC.tokens < SPEC.slots:
            p = tl.where((slot < SPEC.tokens)[None, :], p, 0.0)
        dp = tl.dot(d_out, tl.load(v + across)) * of_values
        ds = p * (dp - dots[:, None])
        gradient += tl.dot(ds.to(k.dtype.element_ty), tl.trans(keys_t))
    gradient *= tl.load(query_factor)
    token = tl.load(rows + row)
    where = outside(token, batch, head, SPEC)
    tl.store(dq + where, gradient.to(dq.dtype.element_ty), mask=(token >= 0)[:, None])


@triton.jit
def key_gradient_tile(
    q, k, v, do, delta, log_sums, factor, value_scale, key_factor, rows, order, queries, counts,
    level, dk, dv, SPEC: tl.constexpr,
):  # fmt: skip
    """The gradients of a block of keys and of their values.

    `order` has the tiles with the most queries first, so that no program is late.
    """
    block, sample, batch, head = numbers_of(SPEC.keys, SPEC)
    parts_of_keys: tl.constexpr = SPEC.slots // SPEC.keys
    start = entry_of(level, batch, head, 0, SPEC)
    tile = tl.load(order + start + block // parts_of_keys)
    length: tl.constexpr = SPEC.tiles * SPEC.slots
    parts: tl.constexpr = SPEC.slots // SPEC.queries
    row = (tile * parts_of_keys + block % parts_of_keys) * SPEC.keys + tl.arange(0, SPEC.keys)
    h = tl.arange(0, SPEC.width)
    first = sample.to(tl.int64) * (length * SPEC.width)
    own_keys = tl.load(k + inside(row, sample, SPEC))
    own_values = tl.load(v + inside(row, sample, SPEC))
    to_log2, of_values = tl.load(factor), tl.load(value_scale)
    HEIGHT: tl.constexpr = SPEC.keys
    WIDTH: tl.constexpr = SPEC.width
    gradient = tl.zeros([HEIGHT, WIDTH], tl.float32)
    of_value = tl.zeros([HEIGHT, WIDTH], tl.float32)
    entry = start + tile
    for i in range(tl.load(counts + entry) * parts):
        other = tl.load(queries + entry * SPEC.most + i // parts)
        query = other * SPEC.slots + i % parts * SPEC.queries + tl.arange(0, SPEC.queries)
        across = first + query[None, :] * SPEC.width + h[:, None]
        sums = tl.load(log_sums + sample * length + query)
        dots = tl.load(delta + sample * length + query)
        queries_t = tl.load(q + across)
        p = exp2(tl.dot(own_keys, queries_t) * to_log2 - sums[None, :])
        d_out_t = tl.load(do + across)
        of_value += tl.dot(p.to(do.dtype.element_ty), tl.trans(d_out_t))
        dp = tl.dot(own_values, d_out_t) * of_values
        ds = p * (dp - dots[None, :])
        gradient += tl.dot(ds.to(q.dtype.element_ty), tl.trans(queries_t))
    gradient *= tl.load(key_factor)
    token = tl.load(rows + row)
    where, there = outside(token, batch, head, SPEC), (token >= 0)[:, None]
    tl.store(dk + where, gradient.to(dk.dtype.element_ty), mask=there)
    tl.store(dv + where, of_value.to(dv.dtype.element_ty), mask=there)
