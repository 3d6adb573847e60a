"""A transformer layer: attention and an MLP around one residual stream.

norms before     x = x + attention(norm(x))     x = x + mlp(norm(x))       Llama and most
norms after      x = x + norm(attention(x))     x = x + norm(mlp(x))       OLMo 2
"""

from flax import nnx
from jaxtyping import Array, Float, Int

from coat_jax import probes
from coat_jax.nn.attention import Attention
from coat_jax.nn.experts import ExpertMLP, Routing
from coat_jax.nn.mlp import MLP, GatedMLP
from coat_jax.nn.norm import AnyNorm
from coat_jax.numerics.cache_formats import CacheFormat
from coat_jax.ops import Past, Visible


class TransformerBlock(nnx.Module):
    """Attention, then the MLP.

    Norms before attention and the MLP are part of them, and so are the residual sums
    (`residual=True`), unless there is a norm after them.

    Attributes:
        attention: the attention; with `residual=False` if `attention_norm` is given.
        mlp: the MLP; with `residual=False` if `mlp_norm` is given.
        attention_norm: of the result of attention, before it is added to x; or None.
        mlp_norm: of the result of the MLP, before it is added to x; or None.
    """

    def __init__(
        self,
        attention: Attention,
        mlp: GatedMLP | MLP | ExpertMLP,
        *,
        attention_norm: AnyNorm | None = None,
        mlp_norm: AnyNorm | None = None,
    ):
        for part, norm in ((attention, attention_norm), (mlp, mlp_norm)):
            if part.residual == (norm is not None):
                there = "no" if norm is None else "a"
                raise ValueError(
                    f"{type(part).__name__} has residual={part.residual}, and there is {there} "
                    "norm after it: the residual sum comes after that norm."
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
        return self.with_routing(x, positions, segments)[0]

    def with_routing(
        self,
        x: Float[Array, "B S D"],
        positions: Int[Array, "*B S"] | None = None,
        segments: Int[Array, "B S"] | None = None,
    ) -> tuple[Float[Array, "B S D"], Routing | None]:
        """As `__call__`; also returns how the tokens were divided, if there are experts."""
        with probes.named("attention"):
            y = self.attention(x, positions, segments)
        return self._after(x, y, segments)

    def prefill(
        self,
        x: Float[Array, "B S D"],
        positions: Int[Array, "*B S"] | None = None,
        segments: Int[Array, "B S"] | None = None,
        cache: CacheFormat | None = None,
    ) -> tuple[Float[Array, "B S D"], Past]:
        """As `__call__`; also returns the keys and values of these tokens, for `decode`."""
        y, new = self.attention.prefill(x, positions, segments, cache)
        return self._after(x, y)[0], new

    def decode(
        self,
        x: Float[Array, "B 1 D"],
        positions: Int[Array, "B 1"],
        visible: Visible,
    ) -> tuple[Float[Array, "B 1 D"], Past]:
        """One new token of each sequence; see `Attention.decode`."""
        y, new = self.attention.decode(x, positions, visible)
        return self._after(x, y)[0], new

    def _after(
        self, x: Float[Array, "B S D"], y: Float[Array, "B S D"], segments: Array | None = None
    ) -> tuple[Float[Array, "B S D"], Routing | None]:
        """The residual stream after this layer, from its input x and the result y of attention."""
        routing = None
        if self.attention_norm is None:
            x = y
        else:
            with probes.named("attention_norm"):
                x = x + self.attention_norm(y)
        with probes.named("mlp"):
            if isinstance(self.mlp, ExpertMLP):
                y, routing = self.mlp.with_routing(x, segments)
            else:
                y = self.mlp(x)
        if self.mlp_norm is None:
            return y, routing
        with probes.named("mlp_norm"):
            return x + self.mlp_norm(y), routing
