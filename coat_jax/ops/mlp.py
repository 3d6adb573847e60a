"""The MLP of a transformer layer, from its norm to its residual sum.

    gated_mlp   x + (act(n g) * (n u)) d          n = norm(x); Llama, Mistral, Qwen
    mlp         x + act(n u + b) d + c            GPT-2, and with act = relu^2 others

Kept for the backward pass: x and the pre-activations (n g, n u), in FP8 blocks or as they come.
The norm, the activation and their product are recomputed from these.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from coat_jax.kernels.activation import (
    Activation,
    activate,
    activate_backward,
    require_activation,
)
from coat_jax.kernels.norm import Norm, Stats, normalize, normalize_backward, statistics
from coat_jax.ops.backward import rounds_rows, run_backward
from coat_jax.ops.keep import Kept, keep, restore
from coat_jax.ops.linear import require_norm
from coat_jax.ops.projection import (
    Biases,
    Weights,
    input_operand,
    project,
    project_backward,
    require_layers,
    require_real,
)
from coat_jax.precision import COAT, Precision


def gated_mlp(
    x: Float[Array, "*rows D"],
    norm: Norm | None,
    gate: Float[Array, "D F"],
    up: Float[Array, "D F"],
    down: Float[Array, "F D"],
    *,
    activation: Activation = "silu",
    residual: bool = True,
    precision: Precision = COAT,
) -> Float[Array, "*rows D"]:
    """x + (act(norm(x) gate) * (norm(x) up)) down.

    Args:
        x: the residual stream, of any leading shape.
        norm: RMSNorm or LayerNorm; None for a layer that has none here.
        gate: weight of the gate.
        up: weight of what is gated.
        down: weight back to the width of x.
        activation: of the gate.
        residual: whether x is added to the result.
        precision: see `coat.Precision`.
    """
    if gate.shape != up.shape:
        raise ValueError(f"gate {gate.shape} and up {up.shape} must have one shape.")
    _require("gated_mlp", x, norm, (gate, up), (None, None), down, None, activation)
    settings = _Settings(activation, residual, precision, "gated_mlp")
    return _mlp(settings, x, norm, (gate, up), (None, None), down, None)


def mlp(
    x: Float[Array, "*rows D"],
    norm: Norm | None,
    up: Float[Array, "D F"],
    down: Float[Array, "F D"],
    up_bias: Float[Array, "F"] | None = None,
    down_bias: Float[Array, "D"] | None = None,
    *,
    activation: Activation = "gelu_tanh",
    residual: bool = True,
    precision: Precision = COAT,
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
    """
    _require("mlp", x, norm, (up,), (up_bias,), down, down_bias, activation)
    settings = _Settings(activation, residual, precision, "mlp")
    return _mlp(settings, x, norm, (up,), (up_bias,), down, down_bias)


def _require(
    name: str,
    x: Array,
    norm: Norm | None,
    weights: Weights,
    biases: Biases,
    down: Array,
    down_bias: Array | None,
    activation: str,
) -> None:
    require_activation(activation)
    require_real(name, x)
    if norm is not None:
        require_norm(name, x.shape[-1], norm)
    require_layers(name, x.shape[-1], weights, biases)
    require_layers(name, weights[0].shape[1], (down,), (down_bias,))
    if down.shape[1] != x.shape[-1]:
        raise ValueError(f"{name} got x with {x.shape[-1]} columns and down {down.shape}.")


class _Settings(NamedTuple):
    activation: Activation
    residual: bool
    precision: Precision
    name: str


class _Residuals(NamedTuple):
    """What is kept; the weights are the caller's own arrays."""

    x: Kept
    stats: Stats | None
    hidden: tuple[Kept, ...]  # before the activation: gate and up, or up
    norm: Norm | None
    weights: Weights
    biases: Biases
    down: Array
    down_bias: Array | None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(
    settings: _Settings,
    x: Array,
    norm: Norm | None,
    weights: Weights,
    biases: Biases,
    down: Array,
    down_bias: Array | None,
) -> Array:
    return _forward(settings, x, norm, weights, biases, down, down_bias)[0]


def _forward(
    settings: _Settings,
    x: Array,
    norm: Norm | None,
    weights: Weights,
    biases: Biases,
    down: Array,
    down_bias: Array | None,
) -> tuple[Array, _Residuals]:
    precision, dtype = settings.precision, x.dtype
    kept = keep(x, precision.forward, precision.block)
    values = restore(kept, jnp.float32, precision.block)
    stats = None if norm is None else statistics(values, norm)
    n = input_operand(_normed(values, stats, norm), dtype, precision)
    hidden = tuple(
        keep(h, precision.forward, precision.block)
        for h in project(n, weights, biases, dtype, precision)
    )
    a = input_operand(_activated(settings, hidden), dtype, precision)
    (y,) = project(a, (down,), (down_bias,), dtype, precision)
    result = x + y if settings.residual else y
    return result, _Residuals(kept, stats, hidden, norm, weights, biases, down, down_bias)


def _backward(settings: _Settings, residuals: _Residuals, gradient: Array) -> Any:
    def backward(r: _Residuals, dy: Array) -> Any:
        precision, dtype = settings.precision, dy.dtype
        a = input_operand(_activated(settings, r.hidden), dtype, precision)
        da, (d_down,), (d_down_bias,) = project_backward(
            a, (r.down,), (r.down_bias,), (dy,), dtype, precision
        )
        hidden = [restore(h, jnp.float32, precision.block) for h in r.hidden]
        d_hidden = activate_backward(hidden, da, settings.activation)
        values = restore(r.x, jnp.float32, precision.block)
        n = input_operand(_normed(values, r.stats, r.norm), dtype, precision)
        dn, d_weights, d_biases = project_backward(
            n, r.weights, r.biases, [d.astype(dtype) for d in d_hidden], dtype, precision
        )
        dx, d_norm = dn, None
        if r.norm is not None and r.stats is not None:
            dx, d_norm = normalize_backward(values, r.stats, r.norm, dn)
        if settings.residual:
            dx = dx + dy.astype(jnp.float32)
        return dx.astype(dtype), d_norm, d_weights, d_biases, d_down, d_down_bias

    rounds = rounds_rows(settings.precision)
    return run_backward(backward, (residuals,), gradient, name=settings.name, rounds=rounds)


_mlp.defvjp(_forward, _backward)


def _normed(values: Array, stats: Stats | None, norm: Norm | None) -> Array:
    return values if norm is None or stats is None else normalize(values, stats, norm)


def _activated(settings: _Settings, hidden: tuple[Kept, ...]) -> Float[Array, "*rows F"]:
    """The activation of what was kept, in FP32."""
    values = [restore(h, jnp.float32, settings.precision.block) for h in hidden]
    return activate(values, settings.activation)
