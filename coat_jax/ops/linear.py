"""Linear layers, with or without the norm before them.

    linear        y_i = x w_i + b_i                saves x as one FP8 tensor
    norm_linear   y_i = norm(x) w_i + b_i          saves x in FP8 blocks; the norm is recomputed

Several weights can share one input, which is saved once: query, key and value, or gate and up. In
full precision both functions save x itself.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from coat_jax.kernels.dispatch import Implementation
from coat_jax.kernels.gemm import Operand
from coat_jax.kernels.norm import Norm
from coat_jax.kernels.sharding import as_3d
from coat_jax.numerics.explicit_axes import explicit_spec, merge_specs, shard_inside
from coat_jax.ops import recording
from coat_jax.ops.backward import batched_alike, define_op, rounds_rows
from coat_jax.ops.checks import require_columns, require_layers, require_norm
from coat_jax.ops.saved.norm import SavedNorm, norm_gradient, recompute_norm, save_norm
from coat_jax.ops.saved.projection import (
    Biases,
    Mode,
    Outputs,
    Scales,
    Weights,
    as_layers,
    bias_gradients,
    gradient_operand,
    input_gradient,
    mode_of,
    project,
    quantize_input,
    residual_of,
    weight_gradients,
)
from coat_jax.precision import COAT, Precision
from coat_jax.probes import Probe


def linear(
    x: Float[Array, "*rows K"],
    weights: Array | Sequence[Array],
    biases: Array | Sequence[Array | None] | None = None,
    *,
    precision: Precision | str = COAT,
    implementation: Implementation | None = None,
) -> Any:
    """x w + b: one output for one weight, a tuple of outputs for several.

    Args:
        x: the input, of any leading shape.
        weights: [K, N], or several.
        biases: [N], or one per weight, None where there is none.
        precision: see `coat.Precision`.
        implementation: "xla", "triton", or None to choose by the device.
    """
    ws, bs = as_layers(weights, biases)
    require_columns("linear", x)
    require_layers("linear", x.shape[-1], ws, bs)
    mode = mode_of(precision, implementation)
    probe = recording.probe_of_layers("linear", mode, _names(ws))
    outputs = _on_rows(partial(_linear, mode), ws, x, ws, bs, probe)
    return outputs if isinstance(weights, Sequence) else outputs[0]


def norm_linear(
    x: Float[Array, "*rows K"],
    norm: Norm,
    weights: Array | Sequence[Array],
    biases: Array | Sequence[Array | None] | None = None,
    *,
    precision: Precision | str = COAT,
    implementation: Implementation | None = None,
) -> Any:
    """norm(x) w + b: one output for one weight, a tuple of outputs for several.

    Args:
        x: the input, of any leading shape.
        norm: RMSNorm or LayerNorm.
        weights: [K, N], or several.
        biases: [N], or one per weight, None where there is none.
        precision: see `coat.Precision`.
        implementation: "xla", "triton", or None to choose by the device.
    """
    ws, bs = as_layers(weights, biases)
    require_columns("norm_linear", x)
    require_norm("norm_linear", x.shape[-1], norm)
    require_layers("norm_linear", x.shape[-1], ws, bs)
    mode = mode_of(precision, implementation)
    probe = recording.probe_of_layers("norm_linear", mode, _names(ws), blocks=("saved",))
    outputs = _on_rows(partial(_norm_linear, mode), ws, x, norm, ws, bs, probe)
    return outputs if isinstance(weights, Sequence) else outputs[0]


def _on_rows(layer: Callable[..., Outputs], weights: Weights, x: Array, *rest: Any) -> Outputs:
    """`layer(x, *rest)`, whose outputs have the rows of x, and the columns of the weights."""

    def op(x: Array, *rest: Any) -> Outputs:
        return tuple(y.reshape(*x.shape[:-1], y.shape[-1]) for y in layer(as_3d(x), *rest))

    def result() -> tuple[PartitionSpec, ...]:
        return tuple(merge_specs(*explicit_spec(x)[:-1], explicit_spec(w)[-1]) for w in weights)

    outputs: Outputs = shard_inside(op, result, x, *rest)
    return outputs


def _names(weights: Weights) -> tuple[str, ...]:
    """The names of unnamed weights in telemetry."""
    return tuple(map(str, range(len(weights)))) if len(weights) > 1 else ("",)


# --- linear ----------------------------------------------------------------------------------


def _linear_forward(mode: Mode, x: Array, weights: Weights, biases: Biases) -> Any:
    n = quantize_input(x, x.dtype, mode)
    outputs, scales = project(n, weights, biases, x.dtype, mode)
    saved = residual_of(x, n, mode)

    def record(probe: Probe) -> Probe:
        return recording.products(probe, "input", lambda: x, saved.scale, weights, scales, mode)

    return batched_alike(*outputs), (saved, weights, scales, biases), record


def _linear_backward(
    mode: Mode, n: Operand, weights: Weights, scales: Scales, biases: Biases, gradients: Outputs
) -> Any:
    g = [gradient_operand(dy, mode) for dy in gradients]
    dx = input_gradient(weights, scales, g, gradients[0].dtype, mode)
    d_weights, d_biases = weight_gradients(n, weights, g), bias_gradients(biases, gradients)
    return (dx, d_weights, d_biases), lambda probe: recording.gradients(
        probe, lambda: gradients, g, mode
    )


_linear = define_op(
    "linear", _linear_forward, _linear_backward, rounds=lambda mode: mode.precision.fp8_linear
)


# --- norm_linear -----------------------------------------------------------------------------


def _norm_linear_forward(mode: Mode, x: Array, norm: Norm, weights: Weights, biases: Biases) -> Any:
    saved, n = save_norm(x, norm, mode)
    outputs, scales = project(n, weights, biases, x.dtype, mode)

    def record(probe: Probe) -> Probe:
        return recording.norm(probe, x, saved, norm, weights, scales, mode)

    return batched_alike(*outputs), (saved, norm, weights, scales, biases), record


def _norm_linear_backward(
    mode: Mode,
    saved: SavedNorm,
    norm: Norm,
    weights: Weights,
    scales: Scales,
    biases: Biases,
    gradients: Outputs,
) -> Any:
    dtype = gradients[0].dtype
    n = recompute_norm(saved, norm, mode, dtype)
    g = [gradient_operand(dy, mode) for dy in gradients]
    dn = input_gradient(weights, scales, g, dtype, mode)
    dx, d_norm = norm_gradient(saved, norm, dn, None, mode)
    d_weights, d_biases = weight_gradients(n, weights, g), bias_gradients(biases, gradients)
    return (dx, d_norm, d_weights, d_biases), lambda probe: recording.gradients(
        probe, lambda: gradients, g, mode
    )


_norm_linear = define_op(
    "norm_linear", _norm_linear_forward, _norm_linear_backward, rounds=rounds_rows
)
