"""An embedding whose gradient is summed in FP32."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from coat_jax import ops
from coat_jax.ops.embedding import in_int32


class Embed(nnx.Embed):
    """A drop-in for Flax's `nnx.Embed` with more accurate gradients where it computes in 16 bits.

    `nnx.Embed` casts the table before the lookup, so it sums the gradient of a row in `dtype`, even
    if `param_dtype` is wider. See `coat.ops.embedding`.
    """

    def __call__(self, inputs: Int[Array, "..."], out_sharding: Any = None) -> Float[Array, "..."]:
        """The rows of `inputs`; numbers below 0 count from the end, as in Flax."""
        if out_sharding is not None:
            return super().__call__(inputs, out_sharding)
        inputs = in_int32("The inputs of Embed", inputs)
        if self.num_embeddings == 1:  # as in Flax, all numbers mean this row
            inputs = jnp.zeros_like(inputs)
        rows = ops.embedding(
            self.embedding[...], jnp.where(inputs < 0, inputs + self.num_embeddings, inputs)
        )
        (rows,) = self.promote_dtype((rows,), dtype=self.dtype, inexact=False)
        return rows
