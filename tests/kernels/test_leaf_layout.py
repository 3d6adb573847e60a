"""Which elements of leaves the programs of an optimizer's kernel work on."""

import math

import pytest

from coat_jax.kernels.leaf_layout import BLOCK, layout_of
from coat_jax.kernels.leaf_sharding import LeafShard

SHAPES = [(8, 128), (4, 256), (64, 64), (1024, 16), (768, 1000), (4, 300), (3, 128), (1024,), ()]


@pytest.mark.parametrize("group_size", [16, 128])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_only_blocks_without_a_gap_go_without_masks(shape, group_size):
    """Where rows end within a group, a block reaches beyond its elements, and beyond the array."""
    shards = [LeafShard(shape, 0, ())]
    _, blocks, constants = layout_of(shards, [(0, 0)], group_size)
    assert constants.full == (math.prod(shape) == blocks * BLOCK and shape[-1] % group_size == 0)
