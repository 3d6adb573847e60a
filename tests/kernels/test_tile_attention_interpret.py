"""The kernels of tile attention in Triton's interpreter, against their references."""

import interpreted
from tile_attention_laws import TileAttentionLaws

pytestmark = interpreted.MARKS


class TestKernels(TileAttentionLaws):
    pass
