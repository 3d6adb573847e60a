"""The MLP of a transformer layer as a mixture of experts, with its norm and its router."""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from coat_jax import ops, probes
from coat_jax.kernels.activation import Activation
from coat_jax.nn.norm import AnyNorm, require_norm_or_none
from coat_jax.nn.parameters import UNSHARDED, MeshAxes, value_of, weight, with_whole_groups
from coat_jax.ops.routing import Scores
from coat_jax.precision import COAT, Precision, precision_of

# Initial weights are scaled by the number of inputs of one expert, not of all together.
OF_EACH = nnx.initializers.lecun_normal(batch_axis=0)


class Routing(NamedTuple):
    """How a router divided a batch among experts. L is an axis over layers, if there are several.

    Attributes:
        load: how many tokens each expert has.
        balance: the `balance_loss` of each row.
        z: the `router_z_loss` of each row.
    """

    load: Float[Array, "*L E"]
    balance: Float[Array, "*L B"]
    z: Float[Array, "*L B"]


class SelectionBias(nnx.Variable):
    """A bias for each expert, without a gradient: see `coat.ops.route`."""


class ExpertMLP(nnx.Module):
    """x + sum over the chosen e of weight_e (act(n gate_e) * (n up_e)) down_e, where n = norm(x).

    Each expert is sharded along the mesh's axes `fsdp`, `tensor` and `expert`. See
    `coat.ops.ExpertAxes` for how devices divide the work.

    Args:
        width: columns of the input and of the output.
        hidden: columns between them, in each expert.
        count: how many experts there are.
        has_bias: whether there is a bias.
        axes: the mesh axes over which the parameters are sharded.
        batch_axes: the mesh axes over which the first axis of x is sharded.
        param_dtype: their dtype.
        rngs: where their random numbers come from.

    Attributes:
        norm: a `coat.nn` norm before router and experts, or None.
        router: a weight [width, count].
        gate, up: weights [count, width, hidden].
        down: a weight [count, hidden, width].
        bias: [count], added to the scores that decide which experts are chosen; or None. It starts
            at zero, and the training step changes it.
        chosen: how many experts a token passes through.
        scores, normalized: see `coat.ops.route`.
        activation: a name in `coat.ops.ACTIVATIONS`.
        limit: gate is at most this, and up from -limit to limit; None for no limit.
        residual: whether x is added to the result.
        precision: see `coat.Precision`. The router is in FP32.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        count: int,
        *,
        chosen: int,
        norm: AnyNorm | None = None,
        scores: Scores = "softmax",
        normalized: bool = True,
        has_bias: bool = False,
        activation: Activation = "silu",
        limit: float | None = None,
        residual: bool = True,
        precision: Precision | str = COAT,
        axes: MeshAxes = UNSHARDED,
        batch_axes: tuple[str, ...] = (),
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        require_norm_or_none("norm", norm)
        self.norm = nnx.data(norm)
        self.router = weight(rngs, (width, count), (axes.fsdp,), dtype=param_dtype)
        draw = partial(weight, rngs, init=OF_EACH, dtype=param_dtype)
        columns = axes.hidden_of_experts or None
        self.gate = draw((count, width, hidden), (None, axes.fsdp, columns))
        self.up = draw((count, width, hidden), (None, axes.fsdp, columns))
        narrowing = with_whole_groups((hidden, width), columns, axes.fsdp)
        self.down = draw((count, hidden, width), (None, *narrowing))
        self.bias = nnx.data(SelectionBias(jnp.zeros(count, jnp.float32)) if has_bias else None)
        self.axes = ops.ExpertAxes(batch_axes, axes.hidden_of_experts)
        self.chosen = chosen
        self.scores: Scores = scores
        self.normalized = normalized
        self.activation: Activation = activation
        self.limit = limit
        self.residual = residual
        self.precision = precision_of(precision)

    def __call__(self, x: Float[Array, "*B S D"]) -> Float[Array, "*B S D"]:
        """Applies the layer to the last axis."""
        return self.with_routing(x)[0]

    def with_routing(
        self, x: Float[Array, "*B S D"], segments: Int[Array, "*B S"] | None = None
    ) -> tuple[Float[Array, "*B S D"], Routing]:
        """As `__call__`; also returns how the tokens were divided.

        Args:
            x: the residual stream.
            segments: the number of each token's document. `Routing` leaves out segment 0, which
                is padding.
        """
        n = x
        if self.norm is not None:
            with probes.named("norm"):
                n = self.norm(x)
        with probes.named("router"):
            logits = ops.router_logits(n, value_of(self.router), precision=self.precision)
        experts, weights = ops.route(
            logits,
            self.chosen,
            scores=self.scores,
            normalized=self.normalized,
            bias=value_of(self.bias),
        )
        y = ops.grouped_mlp(
            n.reshape(-1, n.shape[-1]),
            value_of(self.gate),
            value_of(self.up),
            value_of(self.down),
            experts.reshape(-1, self.chosen),
            weights.reshape(-1, self.chosen),
            activation=self.activation,
            limit=self.limit,
            precision=self.precision,
            axes=self.axes,
        ).reshape(x.shape)
        counted = None if segments is None else segments != 0
        load = ops.expert_load(experts, logits.shape[-1], counted)
        routing = Routing(
            jnp.sum(load.reshape(-1, load.shape[-1]), axis=0),
            ops.balance_loss(logits, experts, scores=self.scores, counted=counted),
            ops.router_z_loss(logits, counted),
        )
        return x + y if self.residual else y, routing
