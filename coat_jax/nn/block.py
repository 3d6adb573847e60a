"""A transformer layer: attention and an MLP around one residual stream.

norms before     x = x + attention(norm(x))     x = x + mlp(norm(x))       Llama and most
norms after      x = x + norm(attention(x))     x = x + norm(mlp(x))       OLMo 2
"""

from flax import nnx
from jaxtyping import Array, Float, Int

from coat_jax.nn.attention import Attention
from coat_jax.nn.mlp import MLP, GatedMLP
from coat_jax.nn.norm import AnyNorm


class TransformerBlock(nnx.Module):
    """Attention, then the MLP.

    The norms before them belong to them, and so does the MLP's residual sum (`residual=True`),
    unless there are norms after them.
    """

    def __init__(
        self,
        attention: Attention,
        mlp: GatedMLP | MLP,
        *,
        attention_norm: AnyNorm | None = None,
        mlp_norm: AnyNorm | None = None,
    ):
        if mlp.residual == (mlp_norm is not None):
            raise ValueError(
                f"The MLP has residual={mlp.residual}, and there is "
                f"{'a' if mlp_norm else 'no'} norm after it: the sum stands after that norm."
            )
        self.attention, self.mlp = attention, mlp
        self.attention_norm, self.mlp_norm = nnx.data(attention_norm), nnx.data(mlp_norm)

    def __call__(
        self,
        x: Float[Array, "B S D"],
        positions: Int[Array, "*B S"] | None = None,
        segments: Int[Array, "B S"] | None = None,
    ) -> Float[Array, "B S D"]:
        """The residual stream after this layer; for the arguments see `Attention`."""
        y = self.attention(x, positions, segments)
        x = x + (y if self.attention_norm is None else self.attention_norm(y))
        y = self.mlp(x)
        return y if self.mlp_norm is None else x + self.mlp_norm(y)
