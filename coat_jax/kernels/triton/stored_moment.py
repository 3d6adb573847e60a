"""A moment in expanded FP8, read and rewritten: counterpart of `coat_jax.kernels.stored_moment`.

A program has one block of groups (LEAVES, a `leaf_layout.Leaves`). FORMAT is a `MomentFormat`.
LARGEST is the largest number of the dtype of `amax`, which is also the dtype of the moment in an
optimizer's step.
"""

import triton
import triton.language as tl

from coat_jax.kernels.triton.arithmetic import clip, copysign
from coat_jax.kernels.triton.expansion import decode, encode
from coat_jax.kernels.triton.leaf_layout import number_in_leaf, place_block
from coat_jax.kernels.triton.moments import load_codes
from coat_jax.kernels.triton.noise import noise_bits


@triton.jit
def load_moment(codes, amax, x16, group, group_mask, mask, LARGEST: tl.constexpr,
                FORMAT: tl.constexpr):  # fmt: skip
    """The values of a block, in the dtype of amax. The largest of a group is exact."""
    q = load_codes(codes, mask, FORMAT)
    largest = tl.load(amax + group, mask=group_mask, other=0.0).to(tl.float32)
    steps = tl.load(x16 + group, mask=group_mask, other=16)
    one = tl.full(largest.shape, 1.0, tl.float32)
    share = decode(q, one, steps, 0.0, FORMAT)
    share = tl.where(tl.abs(q) == FORMAT.fp8.max, 1.0, share)
    return narrow(copysign(largest[:, None] * share, q), amax.dtype.element_ty, LARGEST)


@triton.jit
def narrow(x, dtype: tl.constexpr, LARGEST: tl.constexpr):
    """Casts to a dtype that may have a smaller range."""
    if LARGEST < 3.4028234663852886e38:
        x = clip(x, LARGEST)
    return x.to(dtype)


@triton.jit
def read_moment(
    layout, codes, amax, x16, values,
    LARGEST: tl.constexpr, FORMAT: tl.constexpr, LEAVES: tl.constexpr,
):  # fmt: skip
    """Decodes one block."""
    group, group_mask, start, offsets, mask = place_block(tl.program_id(0), layout, LEAVES)
    here = start + offsets
    decoded = load_moment(codes + here, amax, x16, group, group_mask, mask, LARGEST, FORMAT)
    tl.store(values + here, decoded, mask=mask)


@triton.jit
def rewrite_moment(
    key, layout, new, codes, amax, x16, codes_out, amax_out, x16_out,
    LARGEST: tl.constexpr, FORMAT: tl.constexpr, LEAVES: tl.constexpr,
):  # fmt: skip
    """Encodes one block in place; groups whose new values equal the decoded old ones stay."""
    group, group_mask, start, offsets, mask = place_block(tl.program_id(0), layout, LEAVES)
    here = start + offsets
    x = tl.load(new + here, mask=mask, other=0.0).to(tl.float32)
    old = load_moment(codes + here, amax, x16, group, group_mask, mask, LARGEST, FORMAT)
    changed = tl.max((old.to(tl.float32) != x).to(tl.int32), axis=1) == 1
    # An infinity becomes the largest number. NaN stays.
    magnitude = tl.minimum(tl.abs(x), 3.4028234663852886e38, propagate_nan=tl.PropagateNan.ALL)
    noise = magnitude  # not used
    if FORMAT.rounding != "nearest":
        number = number_in_leaf(group, layout, LEAVES)
        noise, _ = noise_bits(
            tl.load(key), number, FORMAT.noise_base, FORMAT.noise_base, LEAVES.group
        )
    fresh, fresh_amax, fresh_x16 = encode(magnitude, noise, FORMAT)
    # A group that is nowhere negative may be divided by, and must not be rounded to zero.
    positive = tl.min((x >= 0.0).to(tl.int32), axis=1) == 1
    divisor = positive[:, None] & (magnitude >= 1.1754943508222875e-38)
    fresh = tl.where(divisor & (fresh < FORMAT.fp8.tiny), FORMAT.fp8.tiny, fresh)
    fresh = copysign(fresh, x).to(codes_out.dtype.element_ty)
    # In place: what is not stored stays.
    group_mask = group_mask & changed
    tl.store(codes_out + here, fresh, mask=mask & changed[:, None])
    fresh_amax = narrow(fresh_amax, amax_out.dtype.element_ty, LARGEST)
    tl.store(amax_out + group, fresh_amax, mask=group_mask)
    tl.store(x16_out + group, fresh_x16.to(tl.uint8), mask=group_mask)
