"""The kernels of tile attention on a GPU, against their references."""

import jax
import pytest
from tile_attention_laws import TileAttentionLaws

from coat_jax.ops.tiles import Tiles

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU"),
]


class TestKernels(TileAttentionLaws):
    heads = 3, 128
    grids = (Tiles((4, 16, 16), (4, 8, 8)), Tiles((7, 18, 8), (7, 9, 4)))
    dtype = "bfloat16"
