"""Attention and MLP whose projections are modules, so that each can be replaced.

    ModularAttention    query, key, value and out are modules instead of weights
    ModularGatedMLP     likewise gate, up and down

They compute what `Attention` and `GatedMLP` do in full precision. `coat_jax.quantization` replaces
the projections by quantized layers (`make_modular`), and finds the ranges of their inputs.
"""

from collections.abc import Callable
from typing import Any

from flax import nnx
from jaxtyping import Array, Float, Int

from coat_jax import ops
from coat_jax.kernels.activation import require_activation
from coat_jax.kernels.few_rows import has_activation
from coat_jax.nn.attention import Attention
from coat_jax.nn.children import set_class
from coat_jax.nn.mlp import GatedMLP
from coat_jax.nn.parameters import value_of
from coat_jax.nn.quantized import apply_all, arrays_of
from coat_jax.ops import few_rows
from coat_jax.ops.rotary import join_heads, split_heads
from coat_jax.precision import BF16

Projection = Callable[[Array], Array]
# A function from a projection's name, its weight [K, N] and its bias to its module.
MakeProjection = Callable[[str, nnx.Param, nnx.Param | None], nnx.Module]

ATTENTION_PROJECTIONS = ("query", "key", "value", "out")
MLP_PROJECTIONS = ("gate", "up", "down")


class ModularAttention(Attention):
    """`Attention` whose projections are modules.

    Attributes:
        query, key, value, out: modules from [..., K] to [..., N], with their biases.
    """

    def _heads(self, x: Float[Array, "B S D"], positions: Array | None) -> Any:
        n = x if self.norm is None else self.norm(x)
        layers: tuple[Projection, ...] = (self.query, self.key, self.value)
        q, k, v = (split_heads(y, self.head_dim) for y in apply_all(layers, n))
        return x, *self._normalize_and_rotate(q, k, positions), v

    def decode(
        self,
        x: Float[Array, "B 1 D"],
        positions: Int[Array, "B 1"],
        visible: ops.Visible,
    ) -> tuple[Float[Array, "B 1 D"], ops.Past]:
        """As `Attention.decode`."""
        arrays = arrays_of((self.query, self.key, self.value, self.out))
        rotates_only = self.query_norm is None and self.key_norm is None
        if (
            arrays is None
            or self.rotary is None
            or not (rotates_only and few_rows.has_kernels(visible.past))
            or not few_rows.runs(x, arrays.weights, arrays.activations)
        ):
            return super().decode(x, positions, visible)
        norm = None if self.norm is None else self.norm.as_op_norm()
        where = self.rotary, positions, visible
        return few_rows.attention(
            x, norm, arrays.weights, arrays.biases, *where, residual=self.residual
        )

    def _attend(
        self, x: Float[Array, "B S D"], positions: Array | None, segments: Array | None
    ) -> tuple[Array, Array, Array]:
        x, q, k, v = self._heads(x, positions)
        settings: dict[str, Any] = {"causal": self.causal, "window": self.window}
        o = ops.attention(q, k, v, segments=segments, precision=self.precision, **settings)
        y = self._project_out(join_heads(o))
        return x + y if self.residual else y, k, v

    def _project_out(self, joined: Float[Array, "B S NH"]) -> Float[Array, "B S D"]:
        out: Projection = self.out
        return out(joined)


class ModularGatedMLP(GatedMLP):
    """`GatedMLP` whose projections are modules.

    Attributes:
        gate, up, down: modules from [..., K] to [..., N].
    """

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """Applies the layer to the last axis."""
        arrays = arrays_of((self.gate, self.up, self.down))
        if (
            arrays is not None
            and has_activation(self.activation)
            and few_rows.runs(x, arrays.weights, arrays.activations)
        ):
            norm = None if self.norm is None else self.norm.as_op_norm()
            act = require_activation(self.activation, self.limit)
            return few_rows.gated_mlp(
                x, norm, arrays.weights, arrays.biases, act, residual=self.residual
            )
        n = x if self.norm is None else self.norm(x)
        gate, up = apply_all((self.gate, self.up), n)
        how: Any = {"activation": self.activation, "limit": self.limit}
        hidden = ops.activate(gate, up, precision=self.precision, **how)
        y = self.down(hidden)
        return x + y if self.residual else y


class Dense(nnx.Module):
    """y = x kernel + bias in the dtype of x, for projections that stay as they are."""

    def __init__(self, kernel: nnx.Param, bias: nnx.Param | None):
        self.kernel, self.bias = kernel, nnx.data(bias)

    def __call__(self, x: Float[Array, "*rows K"]) -> Float[Array, "*rows N"]:
        """Applies the layer to the last axis."""
        return ops.linear(x, value_of(self.kernel), value_of(self.bias), precision=BF16)


def make_modular(layer: Attention | GatedMLP, make: MakeProjection) -> None:
    """Replaces the projections of a layer by modules, in place."""
    of_attention = isinstance(layer, Attention)
    set_class(layer, ModularAttention if of_attention else ModularGatedMLP)
    for name in ATTENTION_PROJECTIONS if of_attention else MLP_PROJECTIONS:
        bias = getattr(layer, f"{name}_bias", None)  # a gated MLP has none
        setattr(layer, name, make(name, getattr(layer, name), bias))
        setattr(layer, f"{name}_bias", nnx.data(None))
    layer.precision = BF16
