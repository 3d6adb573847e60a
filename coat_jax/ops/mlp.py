"""The MLP of a transformer layer, from its norm to its residual sum.

    gated_mlp   x + (act(n g) * (n u)) d          n = norm(x); Llama, Mistral, Qwen
    mlp         x + act(n u + b) d + c            GPT-2, and with act = relu^2 others

Saved for the backward pass: x and the pre-activations (n g, n u), in FP8 blocks or as they are. The
norm, the activation and their product are recomputed from these.
"""

from typing import Any, NamedTuple

from jaxtyping import Array, Float

from coat_jax.kernels.activation import Activation, require_activation
from coat_jax.kernels.dispatch import Implementation
from coat_jax.kernels.norm import Norm
from coat_jax.kernels.sharding import as_3d
from coat_jax.numerics.explicit_axes import explicit_spec, merge_specs, shard_inside
from coat_jax.ops import recording
from coat_jax.ops.backward import define_op, rounds_rows
from coat_jax.ops.checks import require_columns, require_layers, require_norm
from coat_jax.ops.saved.activation import (
    SavedActivation,
    activation_gradients,
    gradient_values,
    save_activation,
)
from coat_jax.ops.saved.norm import SavedNorm, norm_gradient, recompute_norm, save_norm
from coat_jax.ops.saved.projection import (
    Biases,
    Mode,
    Scales,
    Weights,
    bias_gradients,
    bounded_input_gradient,
    input_gradient,
    mode_of,
    multiply,
    outputs_of,
    project,
    weight_gradients,
)
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
    settings = _MLPSettings(activation, residual, mode_of(precision, implementation), "gated_mlp")
    return _apply(settings, x, norm, (gate, up), (None, None), down, None)


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
    settings = _MLPSettings(activation, residual, mode_of(precision, implementation), "mlp")
    return _apply(settings, x, norm, (up,), (up_bias,), down, down_bias)


class _MLPSettings(NamedTuple):
    activation: Activation
    residual: bool
    mode: Mode
    name: str


def _apply(
    settings: _MLPSettings,
    x: Array,
    norm: Norm | None,
    weights: Weights,
    biases: Biases,
    down: Array,
    down_bias: Array | None,
) -> Any:
    """The checked MLP, whose result has the shape of x, and its sharding over explicit axes."""
    name = settings.name
    require_activation(settings.activation)
    require_columns(name, x)
    if norm is not None:
        require_norm(name, x.shape[-1], norm)
    require_layers(name, x.shape[-1], weights, biases)
    shapes = [weight.shape for weight in weights]
    if shapes[0] != shapes[-1]:
        raise ValueError("gate {} and up {} must have one shape.".format(*shapes))
    require_layers(name, weights[0].shape[1], (down,), (down_bias,))
    if down.shape[1] != x.shape[-1]:
        raise ValueError(f"{name} got x with {x.shape[-1]} columns and down {down.shape}.")
    hidden = ("gate", "up")[-len(weights) :]
    probe = recording.probe_of_layers(
        name,
        settings.mode,
        (*hidden, "down"),
        operands=("input", "down/input"),
        blocks=("saved", *(f"{name}/saved" for name in hidden)),
    )

    def op(x: Array, *rest: Any) -> Array:
        y: Array = _mlps[name](settings, as_3d(x), *rest)
        return y.reshape(x.shape)

    arrays = (x, norm, weights, biases, down, down_bias, probe)
    return shard_inside(op, lambda: merge_specs(*explicit_spec(x)), *arrays)


class _Saved(NamedTuple):
    """What is saved; norm and weights are references to the caller's arrays."""

    x: SavedNorm
    hidden: SavedActivation
    norm: Norm | None
    weights: Weights
    biases: Biases
    down: Array
    down_bias: Array | None
    scales: Scales  # of the weights, down's last


def _forward(
    settings: _MLPSettings,
    x: Array,
    norm: Norm | None,
    weights: Weights,
    biases: Biases,
    down: Array,
    down_bias: Array | None,
) -> Any:
    act, residual, mode, _ = settings
    saved, n = save_norm(x, norm, mode)
    products, scales = multiply(n, weights, x.dtype, mode)
    pre_activations = outputs_of(products, biases, x.dtype)
    unscaled = products if all(bias is None for bias in biases) else ()
    hidden, a = save_activation(pre_activations, act, mode, unscaled=unscaled)
    (y,), (down_scale,) = project(a, (down,), (down_bias,), x.dtype, mode)

    def record(probe: Probe) -> Probe:
        probe = recording.norm(probe, x, saved, norm, weights, scales, mode)
        return recording.activation(probe, pre_activations, hidden, act, down, down_scale, mode)

    all_scales = (*scales, down_scale)
    residuals = _Saved(saved, hidden, norm, weights, biases, down, down_bias, all_scales)
    return x + y if residual else y, (residuals,), record


def _backward(settings: _MLPSettings, saved: _Saved, dy: Array) -> Any:
    act, residual, mode, _ = settings
    g, da, da_bound = bounded_input_gradient(saved.down, saved.scales[-1], dy, mode)
    a, d_hidden = activation_gradients(saved.hidden, da, da_bound, act, mode)
    (d_down,) = weight_gradients(a, (saved.down,), (g,))
    (d_down_bias,) = bias_gradients((saved.down_bias,), (dy,))

    dn = input_gradient(saved.weights, saved.scales[:-1], d_hidden, dy.dtype, mode)
    n = recompute_norm(saved.x, saved.norm, mode, dy.dtype)
    d_weights = weight_gradients(n, saved.weights, d_hidden)
    d_biases = saved.biases
    if any(bias is not None for bias in saved.biases):
        d_biases = bias_gradients(saved.biases, gradient_values(saved.hidden, da, act, mode))
    dx, d_norm = norm_gradient(saved.x, saved.norm, dn, dy if residual else None, mode)

    def record(probe: Probe) -> Probe:
        probe = recording.gradients(
            probe, lambda: gradient_values(saved.hidden, da, act, mode), d_hidden, mode
        )
        return recording.gradients(probe, lambda: (dy,), (g,), mode, first=len(d_hidden))

    return (dx, d_norm, d_weights, d_biases, d_down, d_down_bias), record


_mlps = {
    name: define_op(name, _forward, _backward, rounds=lambda settings: rounds_rows(settings.mode))
    for name in ("gated_mlp", "mlp")
}
