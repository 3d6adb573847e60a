"""Linear layers, with or without the norm before them.

    linear        y_i = x w_i + b_i                keeps x as one FP8 tensor
    norm_linear   y_i = norm(x) w_i + b_i          keeps x in FP8 blocks; the norm is recomputed

Several weights share one input, which is kept once: query, key and value, or gate and up. In
full precision both keep x itself.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from coat_jax.kernels.gemm import Operand
from coat_jax.kernels.norm import Norm, Stats, normalize, normalize_backward, statistics
from coat_jax.ops.backward import rounds_rows, run_backward
from coat_jax.ops.keep import Kept, keep, restore
from coat_jax.ops.projection import (
    Biases,
    Outputs,
    Weights,
    as_layers,
    input_operand,
    project,
    project_backward,
    require_layers,
    require_real,
)
from coat_jax.precision import COAT, Precision


def linear(
    x: Float[Array, "*rows K"],
    weights: Array | Sequence[Array],
    biases: Array | Sequence[Array | None] | None = None,
    *,
    precision: Precision = COAT,
) -> Any:
    """x w + b: one output for one weight, a tuple of outputs for several.

    Args:
        x: the input, of any leading shape.
        weights: [K, N], or several.
        biases: [N], or one per weight, None where there is none.
        precision: see `coat.Precision`.
    """
    ws, bs = as_layers(weights, biases)
    require_real("linear", x)
    require_layers("linear", x.shape[-1], ws, bs)
    outputs = _linear(precision, x, ws, bs)
    return outputs if isinstance(weights, Sequence) else outputs[0]


def norm_linear(
    x: Float[Array, "*rows K"],
    norm: Norm,
    weights: Array | Sequence[Array],
    biases: Array | Sequence[Array | None] | None = None,
    *,
    precision: Precision = COAT,
) -> Any:
    """norm(x) w + b: one output for one weight, a tuple of outputs for several.

    Args:
        x: the input, of any leading shape.
        norm: RMSNorm or LayerNorm.
        weights: [K, N], or several.
        biases: [N], or one per weight, None where there is none.
        precision: see `coat.Precision`.
    """
    ws, bs = as_layers(weights, biases)
    require_real("norm_linear", x)
    require_norm("norm_linear", x.shape[-1], norm)
    require_layers("norm_linear", x.shape[-1], ws, bs)
    outputs = _norm_linear(precision, x, norm, ws, bs)
    return outputs if isinstance(weights, Sequence) else outputs[0]


def require_norm(name: str, columns: int, norm: Norm) -> None:
    """Raises unless what the norm learns has one number per column."""
    for part in (norm.scale, norm.shift):
        if part is not None and part.shape != (columns,):
            raise ValueError(
                f"{name} got an input with {columns} columns and a norm with parameters of "
                f"shape {part.shape}: it should be ({columns},)."
            )


# --- linear ----------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(precision: Precision, x: Array, weights: Weights, biases: Biases) -> Outputs:
    return _linear_forward(precision, x, weights, biases)[0]


def _linear_forward(precision: Precision, x: Array, weights: Weights, biases: Biases) -> Any:
    n = input_operand(x, x.dtype, precision)
    return project(n, weights, biases, x.dtype, precision), (n, weights, biases)


def _linear_backward(precision: Precision, residuals: Any, gradients: Outputs) -> Any:
    def backward(n: Operand, weights: Weights, biases: Biases, gradients: Outputs) -> Any:
        dtype = gradients[0].dtype
        dx, *rest = project_backward(n, weights, biases, gradients, dtype, precision)
        return dx.astype(dtype), *rest

    rounds = precision.fp8_linear
    return run_backward(backward, residuals, gradients, name="linear", rounds=rounds)


_linear.defvjp(_linear_forward, _linear_backward)


# --- norm_linear -----------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm_linear(
    precision: Precision, x: Array, norm: Norm, weights: Weights, biases: Biases
) -> Outputs:
    return _norm_linear_forward(precision, x, norm, weights, biases)[0]


def _norm_linear_forward(
    precision: Precision, x: Array, norm: Norm, weights: Weights, biases: Biases
) -> Any:
    kept = keep(x, precision.forward, precision.block)
    values = restore(kept, jnp.float32, precision.block)
    stats = statistics(values, norm)
    n = input_operand(normalize(values, stats, norm), x.dtype, precision)
    outputs = project(n, weights, biases, x.dtype, precision)
    return outputs, (kept, stats, norm, weights, biases)


def _norm_linear_backward(precision: Precision, residuals: Any, gradients: Outputs) -> Any:
    def backward(
        kept: Kept, stats: Stats, norm: Norm, weights: Weights, biases: Biases, gradients: Outputs
    ) -> Any:
        dtype = gradients[0].dtype
        values = restore(kept, jnp.float32, precision.block)
        n = input_operand(normalize(values, stats, norm), dtype, precision)
        dn, d_weights, d_biases = project_backward(n, weights, biases, gradients, dtype, precision)
        dx, d_norm = normalize_backward(values, stats, norm, dn)
        return dx.astype(dtype), d_norm, d_weights, d_biases

    rounds = rounds_rows(precision)
    return run_backward(backward, residuals, gradients, name="norm_linear", rounds=rounds)


_norm_linear.defvjp(_norm_linear_forward, _norm_linear_backward)
