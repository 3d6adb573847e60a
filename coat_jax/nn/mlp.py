"""The MLP of a transformer layer, with the norm before it and the residual sum after it."""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax import ops
from coat_jax.kernels.activation import Activation
from coat_jax.nn.norm import AnyNorm, require_norm_or_none
from coat_jax.nn.parameters import UNSHARDED, MeshAxes, value_of, vector, weight
from coat_jax.precision import COAT, Precision, precision_of


class GatedMLP(nnx.Module):
    """x + (act(norm(x) gate) * (norm(x) up)) down.

    Args:
        width: columns of the input and of the output.
        hidden: columns between them.
        axes: the mesh axes over which the parameters are sharded.
        param_dtype: their dtype.
        rngs: where their random numbers come from.

    Attributes:
        norm: a `coat.nn` norm before the MLP, or None.
        gate, up: weights [width, hidden].
        down: a weight [hidden, width].
        activation: a name in `coat.ops.ACTIVATIONS`.
        limit: gate is at most this, and up from -limit to limit; None for no limit.
        residual: whether x is added to the result.
        precision: see `coat.Precision`.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        norm: AnyNorm | None = None,
        activation: Activation = "silu",
        limit: float | None = None,
        residual: bool = True,
        precision: Precision | str = COAT,
        axes: MeshAxes = UNSHARDED,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        require_norm_or_none("norm", norm)
        self.norm = nnx.data(norm)
        self.gate = weight(rngs, (width, hidden), axes.widening, dtype=param_dtype)
        self.up = weight(rngs, (width, hidden), axes.widening, dtype=param_dtype)
        shape = hidden, width
        self.down = weight(rngs, shape, axes.narrowing(shape), dtype=param_dtype)
        self.activation: Activation = activation
        self.limit = limit
        self.residual = residual
        self.precision = precision_of(precision)

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """Applies the layer to the last axis."""
        return ops.gated_mlp(
            x,
            None if self.norm is None else self.norm.as_op_norm(),
            value_of(self.gate),
            value_of(self.up),
            value_of(self.down),
            activation=self.activation,
            limit=self.limit,
            residual=self.residual,
            precision=self.precision,
        )


class MLP(nnx.Module):
    """x + act(norm(x) up + up_bias) down + down_bias.

    Args:
        width: columns of the input and of the output.
        hidden: columns between them.
        use_bias: whether there are biases, which are zero at first.
        axes: the mesh axes over which the parameters are sharded.
        param_dtype: their dtype.
        rngs: where their random numbers come from.

    Attributes:
        norm: a `coat.nn` norm before the MLP, or None.
        up, down: weights [width, hidden] and [hidden, width].
        up_bias, down_bias: [hidden] and [width], or None.
        activation: a name in `coat.ops.ACTIVATIONS`.
        residual: whether x is added to the result.
        precision: see `coat.Precision`.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        norm: AnyNorm | None = None,
        activation: Activation = "gelu_tanh",
        residual: bool = True,
        use_bias: bool = True,
        precision: Precision | str = COAT,
        axes: MeshAxes = UNSHARDED,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        require_norm_or_none("norm", norm)
        self.norm = nnx.data(norm)
        self.up = weight(rngs, (width, hidden), axes.widening, dtype=param_dtype)
        shape = hidden, width
        self.down = weight(rngs, shape, axes.narrowing(shape), dtype=param_dtype)
        up_bias = vector(hidden, (axes.tensor,), fill=0.0, dtype=param_dtype)
        down_bias = vector(width, fill=0.0, dtype=param_dtype)
        self.up_bias = nnx.data(up_bias if use_bias else None)
        self.down_bias = nnx.data(down_bias if use_bias else None)
        self.activation: Activation = activation
        self.residual = residual
        self.precision = precision_of(precision)

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """Applies the layer to the last axis."""
        return ops.mlp(
            x,
            None if self.norm is None else self.norm.as_op_norm(),
            value_of(self.up),
            value_of(self.down),
            value_of(self.up_bias),
            value_of(self.down_bias),
            activation=self.activation,
            residual=self.residual,
            precision=self.precision,
        )
