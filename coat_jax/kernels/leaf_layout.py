"""Which elements of an optimizer's leaves each program of a kernel works on.

Each program works on one block of 1024 neighbouring elements, in whole groups. It computes the
place of its block from a table with one row per leaf of the launch. `LayoutField` has the order of
the numbers in a row, and `triton.leaf_layout` reads them.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from coat_jax.kernels.leaf_sharding import LeafShard

BLOCK = 1024
MAX_JUMPS = 3  # of a `LeafShard`


class LayoutField(NamedTuple):
    """The index of each number in a leaf's row of the layout table."""

    first_block: int = 0  # of the leaf, among the blocks of the launch
    groups: int = 1
    groups_per_row: int = 2
    columns: int = 3
    leaf: int = 4  # the index of its key
    decayed: int = 5  # whether weight decay applies: 0 or 1
    start: int = 6  # of `LeafShard`
    jumps: int = 7  # of `LeafShard`: MAX_JUMPS pairs
    width: int = 7 + 2 * MAX_JUMPS  # of a row


class Leaves(NamedTuple):
    """The constants with which a kernel reads the table."""

    group: int
    groups_per_block: int
    whole: bool  # whether all groups have all their elements
    full: bool  # whether all blocks do
    jumps: int
    field: LayoutField = LayoutField()


def layout_of(
    shards: Sequence[LeafShard],
    table: Int32[Array, "leaves 2"] | Sequence[Sequence[int]],
    group_size: int,
) -> tuple[Int32[Array, "..."], int, Leaves]:
    """The layout table, with a row of `LayoutField` per leaf; the number of blocks; the constants.

    Args:
        shards: the leaves of the launch.
        table: `LayoutField.leaf` and `decayed` of each.
        group_size: elements per scale.
    """
    rows: list[Any] = []
    blocks = 0
    for leaf, shard in enumerate(shards):
        shape = shard.shape or (1,)
        groups_per_row = -(-shape[-1] // group_size)
        groups = math.prod(shape[:-1]) * groups_per_row
        if len(shard.jumps) > MAX_JUMPS:
            raise ValueError(
                f"A leaf of shape {shard.shape} on each device is sharded along more than "
                f"{MAX_JUMPS + 1} axes."
            )
        jumps = [*shard.jumps, *[(1, 0)] * (MAX_JUMPS - len(shard.jumps))]
        rows += [blocks, groups, groups_per_row, shape[-1], *table[leaf], shard.start]
        rows += [number for jump in jumps for number in jump]
        blocks += -(-groups * group_size // BLOCK)
    # Stacked from scalars, which XLA folds: custom_partitioning takes no array constants.
    layout = jnp.stack([jax.lax.convert_element_type(n, jnp.int32) for n in rows])
    whole = all(shard.shape and shard.shape[-1] % group_size == 0 for shard in shards)
    # A row whose last group is short needs masks, however many elements there are.
    full = whole and all(math.prod(shard.shape) % BLOCK == 0 for shard in shards)
    most = max(len(shard.jumps) for shard in shards)
    return layout, blocks, Leaves(group_size, BLOCK // group_size, whole, full, most)
