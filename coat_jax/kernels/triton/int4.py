"""Products of few rows in FP8 with INT4 weights.

A byte has the codes of two inputs, 64 places apart in a group of 128. Each code u is the byte of
the E4M3 number u / 512, so a product with FP8 needs no conversion: a mask for the low codes, a
shift for the high ones.
"""

import triton
import triton.language as tl

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
    total = tl.zeros([HEIGHT, WIDTH], tl.float32)
    for i in range(tl.minimum(of_part, groups - first)):
        group = first + i
        both = tl.load(of_codes + group * HALF, mask=is_channel[:, None], other=0)
        low = (both & 15).to(x.dtype.element_ty, bitcast=True)
        high = (both >> 4).to(x.dtype.element_ty, bitcast=True)
        at = of_x + group * (2 * HALF)
        product = tl.dot(low, tl.load(at, mask=is_row[None, :], other=0.0))
        product += tl.dot(high, tl.load(at + HALF, mask=is_row[None, :], other=0.0))
        s = tl.load(scale + n * groups + group, mask=is_channel, other=0.0).to(tl.float32)
        of_group = tl.load(sums + m * groups + group, mask=is_row, other=0.0)
        if HAS_ZERO:
            z = tl.load(zero + n * groups + group, mask=is_channel, other=0).to(tl.float32)
            centre = z[:, None] * of_group[None, :]
        else:
            centre = 8.0 * of_group[None, :]
        total += s[:, None] * (512.0 * product - centre)
    where = out + (part * SPEC.rows + m[None, :]) * CHANNELS + n[:, None]
    tl.store(where, total, mask=is_channel[:, None] & is_row[None, :])
