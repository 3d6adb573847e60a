"""The MLPs of a mixture of experts, each for the tokens that chose it.

    y[t] = sum_j weights[t, j] (act(x[t] gate_e) * (x[t] up_e)) down_e        e = experts[t, j]

No token is dropped, however many choose an expert. Saved for the backward pass: x in FP8 as the
products take it, once for each token and not for each choice; and of each choice the
pre-activations, in FP8 blocks. The norm before and the residual sum are the caller's, whose router
needs the norm, too.

All experts share one scale, for gate and up together: FP8 has a range of 2^15, experts are of
similar size, and scales per row have been found to change nothing. So a weight is rounded by one
kernel, and the products with gate and up are added in one sum.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from coat_jax.errors import UserError
from coat_jax.kernels import gemm, grouped, routing
from coat_jax.kernels.activation import (
    HAVE_KERNELS,
    Activation,
    activate,
    activate_backward,
    activation_backward,
    gradient_bounds,
    require_activation,
)
from coat_jax.kernels.dispatch import Implementation, choose
from coat_jax.kernels.gemm import Operand
from coat_jax.kernels.routing import Groups
from coat_jax.numerics.blocks import Blocks
from coat_jax.numerics.formats import E5M2
from coat_jax.ops import recording
from coat_jax.ops.checks import require_indices, require_real
from coat_jax.ops.definition import batch_alike, define_op, like_first, restore
from coat_jax.ops.mlp import SavedActivation, save_activation
from coat_jax.ops.projection import (
    Input,
    Layers,
    Mode,
    Unrounded,
    as_operand,
    gradient_operand,
    mode_of,
    quantize_input,
    recompute_input,
)
from coat_jax.precision import COAT, Precision, precision_of


class Experts(NamedTuple):
    """The weights of all experts; also their gradients."""

    gate: Float[Array, "E D F"]
    up: Float[Array, "E D F"]
    down: Float[Array, "E F D"]


class Scales(NamedTuple):
    """Those of the weights; None if they are not rounded."""

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
    precision: Precision | str = COAT,
    implementation: Implementation | None = None,
) -> Float[Array, "T D"]:
    """The sum over j of weights[t, j] (act(x[t] gate_e) * (x[t] up_e)) down_e, e = experts[t, j].

    Args:
        x: tokens. On a mesh, call it within `jax.shard_map`, each device with tokens of its own:
            otherwise every device computes all of them.
        gate: weights of the gate, for each expert.
        up: weights of the branch that the gate multiplies.
        down: weights back to the width of x.
        experts: the numbers of the experts that each token chose, from 0 to E - 1.
        weights: of each choice, which need not sum to one.
        activation: of the gate.
        precision: see `coat.Precision`.
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
    if mode.format is None:  # products of any dtype have kernels here
        mode = Mode(precision, choose(implementation))
    if precision.forward_products == "int8":
        raise UserError(
            'grouped_mlp has no products in INT8, which forward_products="int8" asks for. Use '
            "precision=coat.COAT, or coat.COAT_BF16_FORWARD for a lower loss."
        )
    require_activation(activation)
    _require_arrays(x, gate, up, down, experts, weights)
    unaligned = mode.format is None and mode.implementation == "xla"
    aligned = 1 if unaligned else routing.ALIGNED
    _require_choices(experts, gate.shape[0], aligned)
    groups = routing.group(experts, gate.shape[0], aligned)
    arrays: Any = x, Experts(gate, up, down), weights, groups
    if mode.implementation == "xla":  # JAX maps products of groups over all arrays, or over none
        leaves, tree = jax.tree.flatten(arrays)
        arrays = jax.tree.unflatten(tree, batch_alike(*leaves))
    y: Array = _apply(mode, (activation,), *arrays)
    return y


def _require_arrays(
    x: Array, gate: Array, up: Array, down: Array, experts: Array, weights: Array
) -> None:
    for array in (x, gate, up, down, weights):
        require_real("grouped_mlp", array)
    if not jnp.issubdtype(experts.dtype, jnp.integer):
        raise TypeError(f"experts are numbers of experts, integers, not {experts.dtype.name}.")
    fits = x.ndim == 2 and gate.ndim == 3 and gate.shape[1] == x.shape[1] and gate.shape[0] > 0
    if not fits or up.shape != gate.shape or down.shape != (*gate.shape[::2], x.shape[1]):
        raise ValueError(
            f"grouped_mlp takes x [T, D], gate and up [E, D, F] and down [E, F, D], not x "
            f"{list(x.shape)}, gate {list(gate.shape)}, up {list(up.shape)} and down "
            f"{list(down.shape)}."
        )
    if experts.ndim != 2 or len(experts) != len(x) or weights.shape != experts.shape:
        raise ValueError(
            f"experts {list(experts.shape)} and weights {list(weights.shape)} must be [{len(x)}, "
            "k]: one for each choice of each token."
        )


def _require_choices(experts: Array, count: int, aligned: int) -> None:
    tokens, choices = experts.shape
    if choices > count:
        raise UserError(f"each token chooses {choices} experts, and there are {count}.")
    if routing.rows_of(tokens * choices, count, aligned) > routing.MOST_ROWS:
        raise UserError(
            f"{tokens} tokens with {choices} experts each are more rows than 32 bits count, "
            f"{routing.MOST_ROWS}. Use more microbatches, or more devices."
        )
    require_indices("an expert", experts, count)


def _forward(
    mode: Mode, act: Activation, x: Array, w: Experts, weights: Array, groups: Groups
) -> Any:
    how, precision = (groups, x.dtype, mode.implementation), mode.precision
    scales, n = _scales(w, mode), quantize_input(x, x.dtype, mode)
    saved = n
    if isinstance(n, Unrounded):  # the backward pass takes FP8
        saved = gemm.operand(x, precision.forward, "straight", mode.implementation, scale=n.scale)

    def multiply(n: Input, weight: Array, scale: Array | None, of_tokens: bool) -> Array:
        if isinstance(n, Unrounded):
            left, right = (Operand(a, None, None) for a in (n.values, weight.astype(x.dtype)))
        else:
            assert isinstance(n, Operand)
            left, right = n, as_operand(weight, x.dtype, mode, "transposed", scale=scale)
        return grouped.product(left, right, *how, of_tokens=of_tokens)

    # What follows takes rows [B, S], and B is 1.
    hidden = [multiply(n, weight, scales.first, True)[None] for weight in (w.gate, w.up)]
    of_hidden, a = save_activation(hidden, act, mode)
    y = routing.combine(multiply(a, w.down, scales.down, False), *how, weights)

    def record() -> Any:
        layers, down = Layers((w.gate, w.up), (None, None)), Layers((w.down,), (None,))
        of_input = recording.products("input", x, n.scale, layers, (scales.first,) * 2, mode)
        inputs = hidden, of_hidden, act
        return of_input | recording.activation(*inputs, down, (scales.down,), mode)

    return y, (saved, of_hidden, w, scales, weights, groups), record


def _backward(
    mode: Mode,
    act: Activation,
    x: Operand,
    hidden: SavedActivation,
    w: Experts,
    scales: Scales,
    weights: Array,
    groups: Groups,
    dy: Array,
) -> Any:
    implementation, of_choices = mode.implementation, groups.of_choices(weights.astype(jnp.float32))
    how = groups, dy.dtype, implementation
    bounded = mode.fused_block is not None and mode.precision.backward == E5M2
    g = gradient_operand(dy, mode, "straight", lengths=bounded)
    down = as_operand(w.down, dy.dtype, mode, scale=scales.down, lengths=bounded)
    # Of each choice as if its weight were one.
    da = grouped.product_transposed([g], [down], *how, of_tokens=True)[None]
    bound = None
    if bounded:
        bound = groups.of_tokens(gemm.bound_of_product_transposed(g, down)) * jnp.abs(of_choices)
    a, d_hidden, dots = _activation_gradients(hidden, da, of_choices, bound, act, mode)
    d_weights = dots[groups.places].astype(weights.dtype)

    rows, weighted = _transposed(x, dy, groups, of_choices, mode)
    d_gate, d_up = (
        grouped.outer_product(rows, d, groups, w.gate.dtype, implementation) for d in d_hidden
    )
    d_down = grouped.outer_product(a, weighted, groups, w.down.dtype, implementation)
    first = [as_operand(v, dy.dtype, mode, scale=scales.first) for v in (w.gate, w.up)]
    dn = grouped.product_transposed(d_hidden, first, *how)
    dx = routing.combine(dn, *how)

    def record() -> Any:
        gradients = *_d_values(hidden, da, of_choices, act, mode), dy
        return recording.gradients(gradients, (*d_hidden, g), mode)

    return (dx, Experts(d_gate, d_up, d_down), d_weights, None), record


_apply = define_op(
    "grouped_mlp",
    _forward,
    _backward,
    blocks=("gate/saved", "up/saved"),
    operands=("input", "down/input"),
    weights=("gate", "up", "down"),
    specs=lambda act, x, *rest: like_first(x),
)


def _scales(w: Experts, mode: Mode) -> Scales:
    if mode.format is None:
        return Scales(None, None)
    of_gate, of_up, of_down = map(gemm.largest_magnitude, w)
    largest = jnp.maximum(of_gate, of_up), of_down
    return Scales(*(gemm.tensor_scale(each, mode.format) for each in largest))


def _transposed(
    x: Operand, dy: Array, groups: Groups, weights: Array, mode: Mode
) -> tuple[Operand, Operand]:
    """The rows of x, and those of dy times their weights, as operands of outer products."""
    assert x.values is not None
    if mode.format is None or mode.implementation == "xla":
        rows = Operand(groups.of_tokens(x.values), None, x.scale)
        weighted = groups.of_tokens(dy).astype(jnp.float32) * weights[:, None]
        if mode.format is None:
            weighted = weighted.astype(dy.dtype)
        return rows, gradient_operand(weighted, mode)
    dtype, stream = mode.precision.backward, mode.stream("gradients")
    largest = gemm.largest_magnitude(dy) * gemm.largest_magnitude(weights)
    scale = gemm.tensor_scale(largest, dtype)
    of_x = grouped.gather_transposed(x.values, groups)
    of_dy = grouped.gather_transposed(dy, groups, weights, scale, dtype, stream=stream)
    return Operand(None, of_x, x.scale), Operand(None, of_dy, scale)


def _d_values(
    hidden: SavedActivation, da: Array, weights: Array, act: Activation, mode: Mode
) -> tuple[Array, ...]:
    """The gradients of gate's and up's results in FP32."""
    values = [restore(h, jnp.float32, mode.precision.block) for h in hidden.hidden]
    return activate_backward(values, da.astype(jnp.float32) * weights[:, None], act)


def _activation_gradients(
    hidden: SavedActivation,
    da: Float[Array, "1 R F"],
    weights: Float[Array, " R"],
    bound: Float[Array, " R"] | None,
    act: Activation,
    mode: Mode,
) -> tuple[Operand, Sequence[Operand], Float[Array, " R"]]:
    """The recomputed activation, the gradients of its inputs, and those of the weights.

    Args:
        hidden: from `save_activation`.
        da: the gradient of the activation for a weight of one.
        weights: of each row.
        bound: an upper bound of the magnitudes in each row of da times its weight, if one is known.
        act: the activation.
        mode: how to compute.
    """
    saved, scale = hidden
    size = mode.fused_block if act in HAVE_KERNELS else None
    dtype = mode.precision.backward
    if size is not None and scale is not None:
        blocks = [h for h in saved if isinstance(h, Blocks)]
        if bound is None:
            d_values = _d_values(hidden, da, weights, act, mode)
            magnitudes = tuple(map(gemm.largest_magnitude, d_values))
        else:
            magnitudes = gradient_bounds(blocks, bound[None], act)
        of_both = gemm.tensor_scale(jnp.maximum(*magnitudes), dtype)
        recomputed, codes, dots = activation_backward(
            blocks,
            da,
            act,
            scale,
            (of_both, of_both),
            size,
            dtype,
            weights=weights[None],
            stochastic=mode.precision.stochastic_backward,
        )
        assert dots is not None
        return Operand(None, recomputed, scale), [Operand(*c, of_both) for c in codes], dots[0]
    a = activate([restore(h, jnp.float32, mode.precision.block) for h in saved], act)
    dots = jnp.sum(da.astype(jnp.float32) * a, axis=-1)[0]
    d_values = _d_values(hidden, da, weights, act, mode)
    shared: Array | None = None
    if mode.format is None:
        d_values = tuple(d.astype(da.dtype) for d in d_values)
    else:
        shared = gemm.tensor_scale(jnp.maximum(*map(gemm.largest_magnitude, d_values)), dtype)
    gradients = [gradient_operand(d, mode, scale=shared) for d in d_values]
    return recompute_input(a, scale, da.dtype, mode), gradients, dots
