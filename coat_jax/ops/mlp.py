"""The MLP of a transformer layer, from its norm to its residual sum.

    gated_mlp   x + (act(n g) * (n u)) d          n = norm(x); Llama, Mistral, Qwen
    mlp         x + act(n u + b) d + c            GPT-2, and with act = relu^2 others

Saved for the backward pass: x and the pre-activations (n g, n u), in FP8 blocks or as they are. The
norm, the activation and their product are recomputed from these.
"""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Array, Float

from coat_jax.kernels.activation import Activation, Limited, require_activation
from coat_jax.kernels.dispatch import Implementation
from coat_jax.kernels.norm import Norm
from coat_jax.ops import recording
from coat_jax.ops.checks import require_norm, require_real
from coat_jax.ops.definition import define_op, like_first
from coat_jax.ops.norm import SavedNorm, norm_gradient, recompute_norm, save_norm
from coat_jax.ops.projection import (
    Layers,
    Mode,
    Scales,
    as_layers,
    bounded_input_gradient,
    input_gradient,
    mode_of,
    parameter_gradients,
    project,
)
from coat_jax.ops.saved_activation import SavedActivation, activation_gradients, save_activation
from coat_jax.precision import COAT, Precision
from coat_jax.probes import Probe


def gated_mlp(
    x: Float[Array, "*rows D"],
    norm: Norm | None,
    gate: Float[Array, "D F"],
    up: Float[Array, "D F"],
    down: Float[Array, "F D"],
    *,
    activation: Activation = "silu",
    limit: float | None = None,
    residual: bool = True,
    precision: Precision | str = COAT,
    implementation: Implementation | None = None,
) -> Float[Array, "*rows D"]:
    """x + (act(norm(x) gate) * (norm(x) up)) down.

    Args:
        x: the residual stream, of any leading shape.
        norm: RMSNorm or LayerNorm; None for a layer that has none here.
        gate: weight of the gate.
        up: weight of the branch that the gate multiplies.
        down: weight back to the width of x.
        activation: of the gate.
        limit: gate is at most this, and up from -limit to limit; None for no limit. Where this
            changes a value, the value has no gradient.
        residual: whether x is added to the result.
        precision: see `coat.Precision`.
        implementation: "xla", "triton", or None to choose by the device.

    Example:
        >>> import coat_jax as coat, jax, jax.numpy as jnp
        >>> x, norm = jnp.ones((2, 8, 64)), coat.ops.Norm(jnp.ones(64))
        >>> gate = up = jnp.ones((64, 176)) / 64
        >>> down = jnp.ones((176, 64)) / 176
        >>> jax.jit(coat.ops.gated_mlp)(x, norm, gate, up, down).shape
        (2, 8, 64)
    """
    mode, act = mode_of(precision, implementation), require_activation(activation, limit)
    return _apply("gated_mlp", mode, (act, residual), x, norm, (gate, up), (None, None), down, None)


def mlp(
    x: Float[Array, "*rows D"],
    norm: Norm | None,
    up: Float[Array, "D F"],
    down: Float[Array, "F D"],
    up_bias: Float[Array, " F"] | None = None,
    down_bias: Float[Array, " D"] | None = None,
    *,
    activation: Activation = "gelu_tanh",
    residual: bool = True,
    precision: Precision | str = COAT,
    implementation: Implementation | None = None,
) -> Float[Array, "*rows D"]:
    """x + act(norm(x) up + up_bias) down + down_bias.

    Args:
        x: the residual stream, of any leading shape.
        norm: RMSNorm or LayerNorm; None for a layer that has none here.
        up: weight to the hidden width.
        down: weight back to the width of x.
        up_bias: added before the activation.
        down_bias: added to the result.
        activation: see `coat_jax.kernels.activation`.
        residual: whether x is added to the result.
        precision: see `coat.Precision`.
        implementation: "xla", "triton", or None to choose by the device.
    """
    mode, act = mode_of(precision, implementation), require_activation(activation)
    return _apply("mlp", mode, (act, residual), x, norm, (up,), (up_bias,), down, down_bias)


def _apply(
    name: str,
    mode: Mode,
    static: tuple[Limited, bool],
    x: Array,
    norm: Norm | None,
    weights: Sequence[Array],
    biases: Sequence[Array | None],
    down: Array,
    down_bias: Array | None,
) -> Any:
    require_real(name, x, least_rank=1)
    if norm is not None:
        require_norm(name, x.shape[-1], norm)
    layers = as_layers(name, x.shape[-1], weights, biases)
    shapes = [weight.shape for weight in weights]
    if shapes[0] != shapes[-1]:
        raise ValueError("gate {} and up {} must have one shape.".format(*shapes))
    back = as_layers(name, weights[0].shape[1], down, down_bias)
    if static[1] and down.shape[1] != x.shape[-1]:  # the residual sum
        raise ValueError(f"{name} got x with {x.shape[-1]} columns and down {down.shape}.")
    return _OPS[name](mode, static, x, norm, layers, back)


def _forward(
    mode: Mode,
    act: Limited,
    residual: bool,
    x: Array,
    norm: Norm | None,
    layers: Layers,
    down: Layers,
) -> Any:
    saved, n = save_norm(x, norm, mode)
    pre_activations, scales, products = project(n, layers, x.dtype, mode)
    unscaled = products if all(bias is None for bias in layers.biases) else ()
    hidden, a = save_activation(pre_activations, act, mode, unscaled=unscaled)
    (y,), down_scales, _ = project(a, down, x.dtype, mode)

    def record() -> Probe:
        before = recording.norm(x, saved, layers, scales, mode)
        inputs = pre_activations, hidden, act
        return before | recording.activation(*inputs, down, down_scales, mode)

    residuals = saved, hidden, layers, scales, down, down_scales
    return x + y if residual else y, residuals, record


def _backward(
    mode: Mode,
    act: Limited,
    residual: bool,
    saved: SavedNorm,
    hidden: SavedActivation,
    layers: Layers,
    scales: Scales,
    down: Layers,
    down_scales: Scales,
    dy: Array,
) -> Any:
    g, da, da_bound = bounded_input_gradient(down, down_scales[0], dy, mode)

    def d_values() -> tuple[Array, ...]:
        return hidden.gradients(da, act, mode)

    a, d_hidden = activation_gradients(hidden, da, da_bound, act, mode)
    d_down = parameter_gradients(a, down, (g,), lambda: (dy,))
    dn = input_gradient(layers, scales, d_hidden, dy.dtype, mode)
    n = recompute_norm(saved, mode, dy.dtype)
    d_layers = parameter_gradients(n, layers, d_hidden, d_values)
    dx, d_norm = norm_gradient(saved, dn, dy if residual else None, mode)
    gradients = (dx, d_norm, d_layers, d_down)
    return gradients, lambda: recording.gradients((*d_values(), dy), (*d_hidden, g), mode)


_OPS = {
    name: define_op(
        name,
        _forward,
        _backward,
        blocks=("saved", *(f"{each}/saved" for each in hidden)),
        operands=("input", "down/input"),
        weights=(*hidden, "down"),
        specs=lambda act, residual, x, *rest: like_first(x),
        in_3d=True,
    )
    for name, hidden in (("gated_mlp", ("gate", "up")), ("mlp", ("up",)))
}
