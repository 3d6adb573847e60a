"""The kernels of tile attention against their references: laws for the interpreter and the GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax.ops import tile_attention
from coat_jax.ops.tiles import Tiles


class TileAttentionLaws:
    """A module derives from it, and chooses sizes.

    Attributes:
        heads: how many, and the width of each.
        grids: tiles whose rows are all tokens, and tiles with empty rows.
        dtype: of q, k and v.
    """

    heads = 2, 64
    grids = (Tiles((2, 8, 8), (1, 8, 8)), Tiles((4, 6, 4), (2, 3, 4)))
    dtype = "float32"

    @pytest.fixture(params=["fp8", "bf16"])
    def both(self, request):
        """Results and gradients of both implementations, as functions of tiles and lists."""

        def compare(tiles, lists, level, **how):
            shape = (len(level), tiles.count * tiles.tokens, *self.heads)
            keys = jax.random.split(jax.random.key(0), 4)
            q, k, v, do = (jax.random.normal(key, shape, self.dtype) for key in keys)
            k = (k + 2 * jax.random.normal(keys[0], (1, 1, 1, self.heads[1]))).astype(self.dtype)

            def of(implementation):
                def attend(q, k, v):
                    how_all = {"format": request.param, "implementation": implementation, **how}
                    return tile_attention(q, k, v, tiles, lists, level, **how_all)

                o, pull = jax.vjp(attend, q, k, v)
                return o, *pull(do)

            # Probabilities in E4M3 are relative to the largest score so far, or of all: each is
            # rounded otherwise, by 2^-4 at most.
            bound = 0.03 if request.param == "fp8" or self.dtype == "bfloat16" else 1e-5
            for pair in zip(of("triton"), of("xla"), strict=True):
                got, wanted = (np.asarray(x, np.float64) for x in pair)
                assert np.linalg.norm(got - wanted) < bound * np.linalg.norm(wanted)

        return compare

    @pytest.mark.parametrize("number", [0, 1])
    def test_each_sample_has_its_level(self, both, number):
        tiles = self.grids[number]
        both(tiles, tiles.window((1, 1, 1), (2, 1, 1), None), jnp.array([1, 2]))

    def test_heads_may_have_lists_of_their_own(self, both):
        tiles = self.grids[1]
        shape = (2, tiles.count * tiles.tokens, *self.heads)
        q, k = (jax.random.normal(jax.random.key(i), shape) for i in range(2))
        both(tiles, tiles.best_keys(q, k, 2), jnp.arange(2))

    def test_tokens_may_be_in_the_order_of_tiles(self, both):
        both(self.grids[1], None, jnp.zeros(1, jnp.int32), ordered=True, scale=0.3)
