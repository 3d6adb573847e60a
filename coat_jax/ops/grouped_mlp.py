"""The MLPs of a mixture of experts, each for the tokens that chose it.

    y[t] = sum_j weights[t, j] (act(x[t] gate_e) * (x[t] up_e)) down_e        e = experts[t, j]

No token is dropped, however many choose an expert. Saved for the backward pass: x in FP8, as the
products take it, once for each token; and the pre-activations of each choice, in FP8 blocks. The
caller computes the norm, which its router needs too, and the residual sum.

All experts share one scale for gate and up, and one for down: E4M3 spans 2^15, and experts have
similar magnitudes. So one kernel rounds a weight of all experts, and one kernel sums both products
of dx.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from coat_jax.errors import UserError
from coat_jax.kernels import gemm, grouped, int8, routing
from coat_jax.kernels.activation import Activation, Limited, require_activation
from coat_jax.kernels.dispatch import Implementation, choose
from coat_jax.kernels.gemm import Operand
from coat_jax.kernels.routing import Groups
from coat_jax.numerics.formats import E5M2, format_of
from coat_jax.numerics.mesh_axes import shards
from coat_jax.ops import recording
from coat_jax.ops.checks import require_choices, require_experts, require_indices
from coat_jax.ops.definition import batch_alike, define_op, like_first
from coat_jax.ops.expert_axes import UNSHARDED, ExpertAxes
from coat_jax.ops.projection import (
    Input,
    Layers,
    Mode,
    Unrounded,
    as_operand,
    gradient_operand,
    mode_of,
    quantize_input,
)
from coat_jax.ops.saved_activation import (
    SavedActivation,
    save_activation,
    weighted_activation_gradients,
)
from coat_jax.precision import COAT, Precision, precision_of

COLUMNS = 16  # FP8 codes that kernels load at once


class Experts(NamedTuple):
    """The weights of all experts; also their gradients."""

    gate: Float[Array, "E D F"]
    up: Float[Array, "E D F"]
    down: Float[Array, "E F D"]


class Scales(NamedTuple):
    """The scales of the weights; None if they are not rounded."""

    first: Float[Array, ""] | None  # of gate and up
    down: Float[Array, ""] | None


def grouped_mlp(
    x: Float[Array, "T D"],
    gate: Float[Array, "E D F"],
    up: Float[Array, "E D F"],
    down: Float[Array, "E F D"],
    experts: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    *,
    activation: Activation = "silu",
    limit: float | None = None,
    precision: Precision | str = COAT,
    axes: ExpertAxes = UNSHARDED,
    implementation: Implementation | None = None,
) -> Float[Array, "T D"]:
    """The sum over j of weights[t, j] (act(x[t] gate_e) * (x[t] up_e)) down_e, e = experts[t, j].

    Args:
        x: tokens.
        gate: weights of the gate, for each expert.
        up: weights of the branch that the gate multiplies.
        down: weights back to the width of x.
        experts: the indices of the experts that each token chose, from 0 to E - 1. Under jit, those
            out of range are clipped. For a token that is padding, pass weights of 0.
        weights: of the choices; those of a token need not sum to one.
        activation: of the gate.
        limit: as in `gated_mlp`.
        precision: see `coat.Precision`.
        axes: the axes of the current mesh over which tokens and experts are sharded. Along all
            others, every device computes the same.
        implementation: "xla", "triton", or None to choose by the device.

    Example:
        >>> import coat_jax as coat, jax, jax.numpy as jnp
        >>> x, gate, down = jnp.ones((16, 64)), jnp.ones((8, 64, 32)), jnp.ones((8, 32, 64))
        >>> weights, experts = jax.lax.top_k(jax.nn.softmax(x[:, :8]), 2)
        >>> jax.jit(coat.ops.grouped_mlp)(x, gate, gate, down, experts, weights).shape
        (16, 64)
    """
    precision = precision_of(precision)
    mode = mode_of(precision, implementation if precision.fp8_linear else None)
    if mode.format is None:  # these kernels multiply any dtype
        mode = Mode(precision, choose(implementation))
    if precision.forward_products == "int8":
        raise UserError(
            'grouped_mlp has no products in INT8, which forward_products="int8" asks for. Use '
            "precision=coat.COAT, or coat.COAT_BF16_FORWARD for a lower loss."
        )
    act = require_activation(activation, limit)
    require_experts(x, gate, up, down, experts, weights)
    axes = axes.on_mesh()
    together = math.lcm(mode.precision.block or 1, 1 if mode.format is None else COLUMNS)
    axes.require_whole_shards(len(x), gate.shape[-1], together)
    tokens = len(experts) // shards(axes.rows, jax.sharding.get_abstract_mesh())
    require_choices(experts, tokens, gate.shape[0], _alignment(mode))
    experts = require_indices("an expert", experts, gate.shape[0])
    arrays: Any = x, Experts(gate, up, down), experts, weights
    if mode.implementation == "xla":  # vmap of ragged_dot needs a batch of all arrays, or of none
        leaves, tree = jax.tree.flatten(arrays)
        arrays = jax.tree.unflatten(tree, batch_alike(*leaves))
    y: Array = _apply(mode, (act, axes), *arrays)
    return y


def _alignment(mode: Mode) -> int:
    """Each group begins at a multiple of this number of rows."""
    return 1 if mode.format is None and mode.implementation == "xla" else routing.ALIGNED


def _forward(
    mode: Mode,
    act: Limited,
    axes: ExpertAxes,
    x: Array,
    w: Experts,
    experts: Array,
    weights: Array,
) -> Any:
    # Rounded before the gather, which then sends FP8. The scales are maxima over all devices.
    scales, n = _scales(w, mode), quantize_input(x, x.dtype, mode)
    saved = n
    if isinstance(n, Unrounded):  # the backward pass takes FP8
        saved = gemm.operand(
            x, mode.precision.forward, "straight", mode.implementation, scale=n.scale
        )

    def unscaled(n: Input) -> Operand:
        assert not isinstance(n, int8.RowCodes)
        return Operand(n.values, None, None) if isinstance(n, Unrounded) else n

    def right(weight: Array, scale: Array | None) -> Operand:
        if isinstance(n, Unrounded):
            return Operand(weight.astype(x.dtype), None, None)
        return as_operand(weight, x.dtype, mode, "transposed", scale=scale)

    def run(
        n: Operand, first: Sequence[Operand], down: Operand, experts: Array, weights: Array
    ) -> Any:
        n, experts, weights = axes.gather((n, experts, weights))
        groups = routing.group(experts, w.gate.shape[0], _alignment(mode))
        how = groups, x.dtype, mode.implementation
        # `save_activation` takes [B, S, F]: B is 1, and S are the rows.
        hidden = [grouped.product(n, each, *how, of_tokens=True)[None] for each in first]
        of_hidden, a = save_activation(hidden, act, mode, axes=axes.all)
        y = routing.combine(grouped.product(unscaled(a), down, *how), *how, weights)
        return axes.reduce(y), of_hidden, hidden, groups

    of_tokens, of_hidden = axes.spec("t"), axes.spec("brf")
    of_first, of_down = [axes.operand("edf")] * 2, axes.operand("efd")
    inputs = axes.operand("td"), of_first, of_down, of_tokens, of_tokens
    outputs = of_tokens, SavedActivation(of_hidden, axes.spec("")), of_hidden, axes.spec("r")
    first = [right(weight, scales.first) for weight in (w.gate, w.up)]
    arrays = unscaled(n), first, right(w.down, scales.down), experts, weights
    y, of_hidden, hidden, groups = axes.shard(run, inputs, outputs)(*arrays)

    def record() -> Any:
        layers, down = Layers((w.gate, w.up), (None, None)), Layers((w.down,), (None,))
        of_input = recording.products("input", x, n.scale, layers, (scales.first,) * 2, mode)
        inputs = hidden, of_hidden, act
        return of_input | recording.activation(*inputs, down, (scales.down,), mode)

    return y, (saved, of_hidden, w, scales, weights, groups), record


def _backward(
    mode: Mode,
    act: Limited,
    axes: ExpertAxes,
    x: Operand,
    hidden: SavedActivation,
    w: Experts,
    scales: Scales,
    weights: Array,
    groups: Groups,
    dy: Array,
) -> Any:
    bounded = mode.fused_block is not None and mode.precision.backward == E5M2
    g = gradient_operand(dy, mode, "straight", lengths=bounded)
    down = as_operand(w.down, dy.dtype, mode, scale=scales.down, lengths=bounded)
    first = [as_operand(v, dy.dtype, mode, scale=scales.first) for v in (w.gate, w.up)]
    bound = gemm.bound_of_product_transposed(g, down) if bounded else None
    g, down = (each._replace(lengths=None) for each in (g, down))
    weighted_scale = None
    if mode.format is not None and hidden.scale is not None:
        largest = format_of(mode.format).max * hidden.scale * gemm.largest_magnitude(weights)
        weighted_scale = gemm.tensor_scale(largest, mode.format)

    def run(
        x: Operand,
        g: Operand,
        bound: Array | None,
        weights: Array,
        first: Sequence[Operand],
        down: Operand,
        hidden: SavedActivation,
        weighted_scale: Array | None,
        groups: Groups,
    ) -> Any:
        x, g, bound, weights = axes.gather((x, g, bound, weights))
        how = groups, dy.dtype, mode.implementation
        of_choices = groups.of_choices(weights.astype(jnp.float32))
        # The gradient of each choice's activation for a weight of one.
        da = grouped.product_transposed([g], [down], *how, of_tokens=True)[None]
        if bound is not None:
            bound = groups.of_tokens(bound) * jnp.abs(of_choices)
        a, d_hidden, dots = weighted_activation_gradients(
            hidden, weighted_scale, da, of_choices, bound, act, mode, axes.all
        )
        # The weights multiply the activation instead of dy, so dy is rounded only once.
        pairs = [(_in_rows(x, groups, mode), d) for d in d_hidden]
        pairs.append((a, _in_rows(g, groups, mode)))
        d_experts = (
            grouped.outer_product(*pair, groups, weight.dtype, mode.implementation)
            for pair, weight in zip(pairs, w, strict=True)
        )
        dx = routing.combine(grouped.product_transposed(d_hidden, first, *how), *how)
        d_weights = axes.reduce(dots[groups.places]).astype(weights.dtype)
        gradients = axes.reduce(dx), lax.psum(Experts(*d_experts), axes.rows), d_weights
        return gradients, da, of_choices, d_hidden[0].scale

    of_tokens, of_rows, of_hidden = map(axes.spec, ("t", "r", "brf"))
    of_first, of_down = axes.spec("edf"), axes.spec("efd")
    of_x, whole = axes.operand("td"), axes.spec("")
    of_weights = [axes.operand("edf")] * 2, axes.operand("efd")
    of_saved = SavedActivation(of_hidden, whole), whole, of_rows
    inputs = of_x, of_x, of_tokens, of_tokens, *of_weights, *of_saved
    of_gradients = of_tokens, Experts(of_first, of_first, of_down), of_tokens
    run = axes.shard(run, inputs, (of_gradients, of_hidden, of_rows, whole))
    (dx, d_experts, d_weights), da, of_choices, of_both = run(
        x, g, bound, weights, first, down, hidden, weighted_scale, groups
    )

    def record() -> Any:
        weighted = da.astype(jnp.float32) * of_choices[:, None]
        gradients = *hidden.gradients(weighted, act, mode), dy
        of_gradients = Operand(None, None, of_both)
        return recording.gradients(gradients, (of_gradients, of_gradients, g), mode)

    return (dx, d_experts, None, d_weights), record


_apply = define_op(
    "grouped_mlp",
    _forward,
    _backward,
    blocks=("gate/saved", "up/saved"),
    operands=("input", "down/input"),
    weights=("gate", "up", "down"),
    specs=lambda act, axes, x, *rest: like_first(x),
)


def _scales(w: Experts, mode: Mode) -> Scales:
    if mode.format is None:
        return Scales(None, None)
    of_gate, of_up, of_down = map(gemm.largest_magnitude, w)
    largest = jnp.maximum(of_gate, of_up), of_down
    return Scales(*(gemm.tensor_scale(each, mode.format) for each in largest))


def _in_rows(x: Operand, groups: Groups, mode: Mode) -> Operand:
    """An operand of tokens in the order of rows, for `outer_product`."""
    assert x.values is not None
    if mode.format is None or mode.implementation == "xla":
        return Operand(groups.of_tokens(x.values), None, x.scale)
    return Operand(None, grouped.gather_transposed(x.values, groups), x.scale)
