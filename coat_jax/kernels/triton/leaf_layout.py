"""Where the block of a program lies: the counterpart of `coat_jax.kernels.leaf_layout`.

A block is [B, G]: B groups of G neighbouring elements. `layout` is a leaf's row of the table, and
LEAVES a `leaf_layout.Leaves`.
"""

import triton
import triton.language as tl


@triton.jit
def place_block(block, layout, LEAVES: tl.constexpr):
    """The block's groups and their mask; where it starts; its elements from there; their mask."""
    GROUP: tl.constexpr = LEAVES.group
    COUNT: tl.constexpr = LEAVES.groups_per_block
    FIELD: tl.constexpr = LEAVES.field
    lane = tl.arange(0, GROUP)
    first_group = (block - tl.load(layout + FIELD.first_block)) * COUNT
    group = first_group + tl.arange(0, COUNT)
    group_mask = group < tl.load(layout + FIELD.groups)
    if LEAVES.whole:
        start = first_group.to(tl.int64) * GROUP
        offsets = tl.arange(0, COUNT)[:, None] * GROUP + lane[None, :]
        mask = group_mask[:, None] & (lane < GROUP)[None, :]
    else:
        groups_per_row = tl.load(layout + FIELD.groups_per_row)
        columns = tl.load(layout + FIELD.columns)
        column = (group % groups_per_row) * GROUP
        start = tl.zeros([], tl.int64)
        offsets = (group // groups_per_row).to(tl.int64) * columns + column
        offsets = offsets[:, None] + lane[None, :]
        mask = group_mask[:, None] & (column[:, None] + lane[None, :] < columns)
    if LEAVES.full:  # All blocks are full: no masks.
        group_mask = tl.full([COUNT], 1, tl.int1)
        mask = tl.full([COUNT, GROUP], 1, tl.int1)
    return group, group_mask, start, offsets, mask


@triton.jit
def number_in_leaf(group, layout, LEAVES: tl.constexpr):
    """The numbers of a shard's groups among those of the whole leaf."""
    JUMPS: tl.constexpr = LEAVES.jumps
    number = group + tl.load(layout + LEAVES.field.start)
    for jump in tl.static_range(JUMPS):
        pair = layout + LEAVES.field.jumps + 2 * jump
        number += (group // tl.load(pair)) * tl.load(pair + 1)
    return number.to(tl.uint32)
