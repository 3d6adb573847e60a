"""Linear layers, with or without the norm before them.

    linear        y_i = x w_i + b_i                saves x as one FP8 tensor
    norm_linear   y_i = norm(x) w_i + b_i          saves x in FP8 blocks; the norm is recomputed

Several weights can share one input, which is saved once: query, key and value, or gate and up. In
full precision both functions save x itself.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from coat_jax.kernels import gemm
from coat_jax.kernels.dispatch import Implementation
from coat_jax.kernels.gemm import Operand
from coat_jax.kernels.norm import Norm
from coat_jax.numerics.explicit_axes import explicit_spec, merge_specs
from coat_jax.ops import recording
from coat_jax.ops.checks import require_norm, require_real
from coat_jax.ops.definition import batch_alike, define_op
from coat_jax.ops.norm import SavedNorm, norm_gradient, recompute_norm, save_norm
from coat_jax.ops.projection import (
    Layers,
    Mode,
    Outputs,
    Scales,
    as_layers,
    fp8_scale,
    gradient_operand,
    input_gradient,
    mode_of,
    parameter_gradients,
    project,
    quantize_input,
)
from coat_jax.precision import COAT, Precision


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
    require_real("linear", x, least_rank=1)
    layers = as_layers("linear", x.shape[-1], weights, biases)
    outputs = _linear(mode_of(precision, implementation), (), x, layers)
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
    require_real("norm_linear", x, least_rank=1)
    require_norm("norm_linear", x.shape[-1], norm)
    layers = as_layers("norm_linear", x.shape[-1], weights, biases)
    outputs = _norm_linear(mode_of(precision, implementation), (), x, layers, norm)
    return outputs if isinstance(weights, Sequence) else outputs[0]


def _specs(x: Array, layers: Layers, *_: Norm) -> tuple[PartitionSpec, ...]:
    """Outputs are sharded like the rows of x, and the columns of the weights."""
    rows = explicit_spec(x)[:-1]
    return tuple(merge_specs(*rows, explicit_spec(w)[-1]) for w in layers.weights)


# --- linear ----------------------------------------------------------------------------------


def _linear_forward(mode: Mode, x: Array, layers: Layers) -> Any:
    n = quantize_input(x, x.dtype, mode)
    outputs, scales, _ = project(n, layers, x.dtype, mode)
    saved, scale = n, fp8_scale(n, mode)
    if not isinstance(saved, Operand):  # the backward pass takes FP8
        assert scale is not None
        dtype, how = mode.precision.forward, mode.implementation
        saved = gemm.operand(x, dtype, "straight", how, scale=scale)
    record = partial(recording.products, "input", x, scale, layers, scales, mode)
    return batch_alike(*outputs), (saved, layers, scales), record


def _linear_backward(
    mode: Mode, n: Operand, layers: Layers, scales: Scales, gradients: Outputs
) -> Any:
    g = [gradient_operand(dy, mode) for dy in gradients]
    dx = input_gradient(layers, scales, g, gradients[0].dtype, mode)
    d_layers = parameter_gradients(n, layers, g, lambda: gradients)
    return (dx, d_layers), lambda: recording.gradients(gradients, g, mode)


_linear = define_op(
    "linear", _linear_forward, _linear_backward, operands=("input",), specs=_specs, in_3d=True
)


# --- norm_linear -----------------------------------------------------------------------------


def _norm_linear_forward(mode: Mode, x: Array, layers: Layers, norm: Norm) -> Any:
    saved, n = save_norm(x, norm, mode)
    outputs, scales, _ = project(n, layers, x.dtype, mode)
    record = partial(recording.norm, x, saved, layers, scales, mode)
    return batch_alike(*outputs), (saved, layers, scales), record


def _norm_linear_backward(
    mode: Mode, saved: SavedNorm, layers: Layers, scales: Scales, gradients: Outputs
) -> Any:
    dtype = gradients[0].dtype
    n = recompute_norm(saved, mode, dtype)
    g = [gradient_operand(dy, mode) for dy in gradients]
    dx, d_norm = norm_gradient(saved, input_gradient(layers, scales, g, dtype, mode), None, mode)
    d_layers = parameter_gradients(n, layers, g, lambda: gradients)
    return (dx, d_layers, d_norm), lambda: recording.gradients(gradients, g, mode)


_norm_linear = define_op(
    "norm_linear",
    _norm_linear_forward,
    _norm_linear_backward,
    blocks=("saved",),
    operands=("input",),
    specs=_specs,
    in_3d=True,
)
