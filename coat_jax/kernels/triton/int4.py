"""Products of few rows in FP8 with INT4 weights.

A byte has the codes of two inputs, 64 places apart in a group of 128. Each code u is the byte of
the E4M3 number u / 512, so a product with FP8 needs no conversion: a mask for the low codes, a
shift for the high ones.
"""

import triton
import triton.language as tl

from coat_jax.kernels.triton.arithmetic import FAST
from coat_jax.kernels.triton.formats import round_to

HALF = tl.constexpr(64)  # of a group


@triton.jit
def few_rows_tile(
    x, sums, codes, scale, zero, codes_2, scale_2, zero_2, codes_3, scale_3, zero_3,
    out, out_2, out_3, HAS_ZERO: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Blocks of up to three weights; SPEC has no channels of those that are not there."""
    parts: tl.constexpr = (SPEC.inputs + SPEC.part - 1) // SPEC.part
    second: tl.constexpr = parts * ((SPEC.channels + SPEC.height - 1) // SPEC.height)
    third: tl.constexpr = second + parts * ((SPEC.channels_2 + SPEC.height - 1) // SPEC.height)
    i = tl.program_id(0)
    if SPEC.channels_2 == 0:  # noqa: SIM114  # a single weight needs no branch
        multiply_block(x, sums, codes, scale, zero, out, i, SPEC.channels, HAS_ZERO, SPEC)
    elif i < second:
        multiply_block(x, sums, codes, scale, zero, out, i, SPEC.channels, HAS_ZERO, SPEC)
    elif i < third:
        i -= second
        multiply_block(x, sums, codes_2, scale_2, zero_2, out_2, i, SPEC.channels_2, HAS_ZERO, SPEC)
    elif SPEC.channels_3 > 0:
        i -= third
        multiply_block(x, sums, codes_3, scale_3, zero_3, out_3, i, SPEC.channels_3, HAS_ZERO, SPEC)


@triton.jit
def add_product_tile(
    x, sums, codes, scale, zero, row_scale, residual, counts_before, out, parts, counts,
    HAS_ZERO: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """A block of one weight over a part of the inputs; the block's last program adds all parts."""
    blocks: tl.constexpr = (SPEC.channels + SPEC.height - 1) // SPEC.height
    PARTS: tl.constexpr = (SPEC.inputs + SPEC.part - 1) // SPEC.part
    i = tl.program_id(0)
    multiply_block(x, sums, codes, scale, zero, parts, i, SPEC.channels, HAS_ZERO, SPEC)
    # Only one thread counts, and it must not do so before the others have stored their numbers.
    tl.debug_barrier()
    if tl.atomic_add(counts + i % blocks, 1) == PARTS - 1:
        HEIGHT: tl.constexpr = SPEC.height
        WIDTH: tl.constexpr = SPEC.width
        m, n = tl.arange(0, WIDTH)[:, None], i % blocks * HEIGHT + tl.arange(0, HEIGHT)[None, :]
        there, where = (m < SPEC.rows) & (n < SPEC.channels), m * SPEC.channels + n
        total = tl.zeros([WIDTH, HEIGHT], tl.float32)
        for part in tl.static_range(PARTS):
            of_part = parts + part * SPEC.rows * SPEC.channels
            total += tl.load(of_part + where, mask=there, other=0.0)
        total *= tl.load(row_scale + m, mask=m < SPEC.rows, other=0.0)
        dtype: tl.constexpr = out.dtype.element_ty
        before = tl.load(residual + where, mask=there, other=0.0).to(tl.float32)
        y = before + round_to(total, dtype).to(tl.float32)
        tl.store(out + where, round_to(y, dtype), mask=there)


@triton.jit
def multiply_block(
    x, sums, codes, scale, zero, out, program,
    CHANNELS: tl.constexpr, HAS_ZERO: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """A block of a weight's channels, over a part of the inputs: out is [parts, rows, channels]."""
    blocks: tl.constexpr = (CHANNELS + SPEC.height - 1) // SPEC.height
    groups: tl.constexpr = SPEC.inputs // (2 * HALF)
    block, part = program % blocks, program // blocks
    HEIGHT: tl.constexpr = SPEC.height
    WIDTH: tl.constexpr = SPEC.width
    n, m, k = block * HEIGHT + tl.arange(0, HEIGHT), tl.arange(0, WIDTH), tl.arange(0, HALF)
    is_channel, is_row = n < CHANNELS, m < SPEC.rows
    of_codes = codes + n.to(tl.int64)[:, None] * (SPEC.inputs // 2) + k[None, :]
    of_x = x + m[None, :] * SPEC.inputs + k[:, None]
    of_part: tl.constexpr = SPEC.part // (2 * HALF)
    first = part * of_part
    count = tl.minimum(of_part, groups - first)
    TOGETHER: tl.constexpr = SPEC.together
    # Blocks begin at different groups: otherwise all programs would read the same few lines of x at
    # the same time, and the L2 cache serves a line to one after another.
    turn = (TOGETHER * block) % count
    total = tl.zeros([HEIGHT, WIDTH], tl.float32)
    # Triton loads numbers of less than 4 bytes only where they are used, so they come one group
    # early: otherwise every group would wait for them.
    of_scale = scale + n * groups
    s = tl.load(of_scale + first + turn, mask=is_channel, other=0.0)
    for i in range(tl.cdiv(count, TOGETHER)):
        for more in tl.static_range(TOGETHER):
            step = TOGETHER * i + more
            there = step < count
            group = first + turned(step, turn, count)
            following = first + turned(step + 1, turn, count)
            next_s = tl.load(of_scale + following, mask=is_channel & (step + 1 < count), other=0.0)
            of_group = tl.load(sums + group * SPEC.rows + m, mask=is_row & there, other=0.0)
            both = tl.load(of_codes + group * HALF, mask=is_channel[:, None] & there, other=0)
            low = (both & 15).to(x.dtype.element_ty, bitcast=True)
            high = high_codes(both).to(x.dtype.element_ty, bitcast=True)
            at = of_x + group * (2 * HALF)
            loaded = is_row[None, :] & there
            product = tl.dot(low, tl.load(at, mask=loaded, other=0.0))
            product = tl.dot(high, tl.load(at + HALF, mask=loaded, other=0.0), product)
            if HAS_ZERO:
                where = zero + n * groups + group
                z = tl.load(where, mask=is_channel & there, other=0).to(tl.float32)
                product -= (z / 8)[:, None] * of_group[None, :]
            else:
                product -= of_group[None, :]
            total += (512.0 * s.to(tl.float32))[:, None] * product
            s = next_s
    where = out + (part * SPEC.rows + m[None, :]) * CHANNELS + n[:, None]
    tl.store(where, total, mask=is_channel[:, None] & is_row[None, :])


@triton.jit
def expand_channel(codes, scale, of_channel, out, found, SPEC: tl.constexpr):
    """A channel's numbers (u - 8) scale / of_channel in E4M3, which has them all.

    Where SPEC.finds is set, of_channel is its largest scale, which is stored in `found`.
    """
    F8: tl.constexpr = out.dtype.element_ty
    GROUPS: tl.constexpr = SPEC.groups
    n = tl.program_id(0).to(tl.int64)
    group, k = tl.arange(0, triton.next_power_of_2(GROUPS)), tl.arange(0, HALF)[None, :]
    there = group < GROUPS
    s = tl.load(scale + n * GROUPS + group, mask=there, other=0.0).to(tl.float32)
    if SPEC.finds:
        largest = tl.max(s, axis=0)  # a maximum passes NaN over, but its group has it
        largest = tl.where(largest > 0, largest, 1.0)
        tl.store(found + n, largest)
    else:
        largest = tl.load(of_channel + n)
    # FP16 has all numbers here, and GPUs convert it from and to E4M3 in pairs.
    factor = (512.0 * (s / largest)).to(tl.float16)[:, None]
    row, there = (n * GROUPS + group)[:, None], there[:, None]
    both = tl.load(codes + row * HALF + k, mask=there, other=0)
    low = (both & 15).to(F8, bitcast=True).to(tl.float16)
    high = high_codes(both).to(F8, bitcast=True).to(tl.float16)
    at = out + row * (2 * HALF) + k
    tl.store(at, ((low - 8 / 512) * factor).to(F8), mask=there)
    tl.store(at + HALF, ((high - 8 / 512) * factor).to(F8), mask=there)


@triton.jit
def turned(step, turn, count):
    """The place of a step in a round of `count` that begins at `turn`."""
    i = step + turn
    return tl.where(i >= count, i - count, i)


@triton.jit
def high_codes(both):
    """The high codes of bytes."""
    if FAST:  # four bytes at a time, which Triton shifts one by one
        return tl.inline_asm_elementwise(
            "{.reg .b32 t; shr.u32 t, $1, 4; and.b32 $0, t, 0x0f0f0f0f;}",
            "=r,r", [both], dtype=tl.uint8, is_pure=True, pack=4,
        )  # fmt: skip
    return both >> 4
