"""Products of rows in groups: see `kernels.grouped`, whose `Spec` is SPEC.

A program has a block of the result, within one expert. Empty rows are zeros: those of the result
are read by what comes after.
"""

import triton
import triton.language as tl

from coat_jax.kernels.triton.formats import round_to_bf16
from coat_jax.kernels.triton.tiles import store_transposed, tile_indices


@triton.jit
def block_of_product(starts, SPEC: tl.constexpr):
    """The expert of this program's block, its first row and column, and the end of the group.

    Programs that follow each other have blocks of the same columns in `together` blocks of
    rows, which the L2 cache then holds. There is no such expert where there are fewer blocks.
    """
    PADDED: tl.constexpr = triton.next_power_of_2(SPEC.experts)
    across: tl.constexpr = (SPEC.outputs + SPEC.width - 1) // SPEC.width
    of_band: tl.constexpr = SPEC.together * across
    program = tl.program_id(0)
    block = program // of_band * SPEC.together + program % SPEC.together
    column = program % of_band // SPEC.together * SPEC.width
    e = tl.arange(0, PADDED)
    begin = tl.load(starts + e, mask=e < SPEC.experts, other=SPEC.rows)
    # The last expert also has the rows after its own, up to the end of the array.
    end = tl.load(starts + e + 1, mask=e < SPEC.experts - 1, other=SPEC.rows)
    blocks = (end - begin + SPEC.height - 1) // SPEC.height
    after = tl.cumsum(blocks, axis=0)
    expert = tl.sum((after <= block).to(tl.int32), axis=0)
    before = tl.sum(tl.where(e < expert, blocks, 0), axis=0)
    first = tl.sum(tl.where(e == expert, begin, 0), axis=0) + (block - before) * SPEC.height
    return expert, first, column, tl.sum(tl.where(e == expert, end, 0), axis=0)


@triton.jit
def add_product(acc, x, w, steps, there, wanted, SPEC: tl.constexpr):
    """acc + x w, for pointers to the first numbers of rows of x and of columns of w."""
    DEPTH: tl.constexpr = SPEC.depth
    k = tl.arange(0, DEPTH)
    for i in range(steps):
        at = i * DEPTH + k
        if SPEC.inputs % DEPTH == 0:
            a = tl.load(x + at[None, :], mask=there[:, None], other=0.0)
            b = tl.load(w + at[:, None] * SPEC.input_stride, mask=wanted[None, :], other=0.0)
        else:
            inside = at < SPEC.inputs
            a = tl.load(x + at[None, :], mask=there[:, None] & inside[None, :], other=0.0)
            mask = inside[:, None] & wanted[None, :]
            b = tl.load(w + at[:, None] * SPEC.input_stride, mask=mask, other=0.0)
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def product_tile(
    x, w, x_2, w_2, tokens, starts, x_scale, w_scale, out, SPEC: tl.constexpr
):  # fmt: skip
    """A block of x w_e, or of the sum of two such products."""
    expert, first, column, end = block_of_product(starts, SPEC)
    HEIGHT: tl.constexpr = SPEC.height
    WIDTH: tl.constexpr = SPEC.width
    if expert < SPEC.experts:
        row, n = first + tl.arange(0, HEIGHT), column + tl.arange(0, WIDTH)
        there, source = row < end, row
        if SPEC.gathered:
            source = tl.load(tokens + row, mask=there, other=-1)
            there = source >= 0
        from_x = source.to(tl.int64)[:, None] * SPEC.inputs
        wanted = n < SPEC.outputs
        of_w = expert.to(tl.int64) * SPEC.expert_stride
        of_w += n.to(tl.int64)[None, :] * SPEC.output_stride
        # After the last group there is nothing to multiply.
        needed: tl.constexpr = (SPEC.inputs + SPEC.depth - 1) // SPEC.depth
        steps = tl.where(first < tl.load(starts + SPEC.experts), needed, 0)
        acc = tl.zeros([HEIGHT, WIDTH], tl.float32)
        acc = add_product(acc, x + from_x, w + of_w, steps, there, wanted, SPEC)
        if SPEC.pairs == 2:
            acc = add_product(acc, x_2 + from_x, w_2 + of_w, steps, there, wanted, SPEC)
        acc *= tl.load(x_scale) * tl.load(w_scale)
        where = out + row.to(tl.int64)[:, None] * SPEC.outputs + n[None, :]
        store_rounded(acc, where, (row < end)[:, None] & wanted[None, :])


@triton.jit
def outer_product_tile(left, right, starts, left_scale, right_scale, out, SPEC: tl.constexpr):
    """A block of the sum over an expert's rows; SPEC is a `kernels.grouped.Sums`."""
    HEIGHT: tl.constexpr = SPEC.height
    WIDTH: tl.constexpr = SPEC.width
    DEPTH: tl.constexpr = SPEC.depth
    down: tl.constexpr = (SPEC.inputs + HEIGHT - 1) // HEIGHT
    across: tl.constexpr = (SPEC.outputs + WIDTH - 1) // WIDTH
    program = tl.program_id(0)
    expert, block = program // (down * across), program % (down * across)
    # As above, but the last band of blocks may be lower.
    band = block // (SPEC.together * across) * SPEC.together
    of_band = tl.minimum(down - band, SPEC.together)
    within = block - band * across
    m = (band + within % of_band) * HEIGHT + tl.arange(0, HEIGHT)
    n = within // of_band * WIDTH + tl.arange(0, WIDTH)
    of_left, of_right = (m < SPEC.inputs)[:, None], (n < SPEC.outputs)[None, :]
    left += m.to(tl.int64)[:, None] * SPEC.input_stride
    right += n.to(tl.int64)[None, :] * SPEC.output_stride
    # Groups are aligned, which the vectors of loads must know.
    first = tl.multiple_of(tl.load(starts + expert), 16)
    rows = tl.multiple_of(tl.load(starts + expert + 1) - first, 16)
    left += first.to(tl.int64) * SPEC.input_row
    right += first.to(tl.int64) * SPEC.output_row
    acc = tl.zeros([HEIGHT, WIDTH], tl.float32)
    # One step even without rows: after a loop that may be empty, ptxas lets each wgmma wait for
    # the one before.
    for i in range(tl.maximum((rows + DEPTH - 1) // DEPTH, 1)):
        row = i * DEPTH + tl.arange(0, DEPTH)
        there = row < rows
        a = tl.load(left + row[None, :] * SPEC.input_row, of_left & there[None, :], other=0.0)
        b = tl.load(right + row[:, None] * SPEC.output_row, of_right & there[:, None], other=0.0)
        acc = tl.dot(a, b, acc)
    acc *= tl.load(left_scale) * tl.load(right_scale)
    at = (expert.to(tl.int64) * SPEC.inputs + m)[:, None] * SPEC.outputs + n[None, :]
    store_rounded(acc, out + at, of_left & of_right)


@triton.jit
def store_rounded(v, where, mask):
    """Stores FP32 numbers in the dtype of the array."""
    if where.dtype.element_ty == tl.bfloat16:
        tl.store(where, round_to_bf16(v), mask=mask)
    else:
        tl.store(where, v.to(where.dtype.element_ty), mask=mask)


@triton.jit
def gather_transposed_tile(x, tokens, out, TILES: tl.constexpr):
    """Rows of tokens as columns."""
    row, column = tile_indices(TILES)
    token = tl.load(tokens + row, mask=row < TILES.rows, other=-1)
    mask = (token >= 0)[:, None] & (column < TILES.columns)[None, :]
    v = tl.load(x + token.to(tl.int64)[:, None] * TILES.columns + column[None, :], mask, other=0.0)
    store_transposed(v, out, row, column, TILES)
