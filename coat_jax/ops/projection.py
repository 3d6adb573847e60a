"""Several linear layers on one input, forward and backward: the part that all ops share.

    y_i  = n w_i + b_i
    dn   = sum_i dy_i w_i^T        dw_i = n^T dy_i        db_i = sum over rows of dy_i

In FP8 the input is rounded to E4M3 once for all weights, each gradient to E5M2 by itself.
Weights are rounded anew in the backward pass: keeping their codes would cost a byte a parameter.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax.kernels import gemm
from coat_jax.kernels.gemm import Operand
from coat_jax.precision import Precision

Weights = tuple[Float[Array, "K N"], ...]
Biases = tuple[Float[Array, "N"] | None, ...]
Outputs = tuple[Float[Array, "*rows N"], ...]


def input_operand(x: Float[Array, "*rows K"], dtype: DTypeLike, precision: Precision) -> Operand:
    """The input as the products take it: FP8, or `dtype`."""
    if precision.fp8_linear:
        return gemm.operand(x, precision.forward)
    return gemm.operand(x.astype(dtype), None)


def project(
    n: Operand, weights: Weights, biases: Biases, dtype: DTypeLike, precision: Precision
) -> Outputs:
    """Returns the outputs of all layers, as `dtype`."""
    outputs = []
    for weight, bias in zip(weights, biases, strict=True):
        y = gemm.product(n, input_operand(weight, dtype, precision), dtype)
        outputs.append(y if bias is None else y + bias.astype(dtype))
    return tuple(outputs)


def project_backward(
    n: Operand,
    weights: Weights,
    biases: Biases,
    gradients: Sequence[Float[Array, "*rows N"]],
    dtype: DTypeLike,
    precision: Precision,
) -> tuple[Float[Array, "*rows K"], Weights, Biases]:
    """Returns the gradients of the input, in FP32, of the weights and of the biases."""
    d_input = jnp.zeros([])
    d_weights, d_biases = [], []
    for weight, bias, dy in zip(weights, biases, gradients, strict=True):
        g = gemm.operand(dy, precision.backward if precision.fp8_linear else None)
        w = input_operand(weight, dtype, precision)
        d_input = d_input + gemm.product_transposed(g, w, dtype).astype(jnp.float32)
        d_weights.append(gemm.outer_product(n, g, weight.dtype))
        d_biases.append(None if bias is None else _sum_of_rows(dy).astype(bias.dtype))
    return d_input, tuple(d_weights), tuple(d_biases)


def _sum_of_rows(dy: Float[Array, "*rows N"]) -> Float[Array, "N"]:
    return jnp.sum(dy.astype(jnp.float32), axis=tuple(range(dy.ndim - 1)))


def as_layers(
    weights: Array | Sequence[Array], biases: Array | Sequence[Array | None] | None
) -> tuple[Weights, Biases]:
    """One weight and bias, or several, as tuples of equal length."""
    if not isinstance(weights, Sequence):
        return (weights,), (biases,)  # type: ignore[return-value]
    if biases is None:
        return tuple(weights), (None,) * len(weights)
    if not isinstance(biases, Sequence) or len(biases) != len(weights):
        given = len(biases) if isinstance(biases, Sequence) else 1
        raise ValueError(
            f"{len(weights)} weights came with {given} biases. Give one per weight, None where "
            "there is none."
        )
    return tuple(weights), tuple(biases)


def require_layers(
    name: str, columns: int, weights: Sequence[Array], biases: Sequence[Array | None]
) -> None:
    """Raises unless each weight is [columns, N] and each bias [N], all real floats."""
    if not weights:
        raise ValueError(f"{name} needs at least one weight.")
    for weight, bias in zip(weights, biases, strict=True):
        if weight.ndim != 2 or weight.shape[0] != columns:
            raise ValueError(
                f"{name} got an input with {columns} columns and a weight of shape "
                f"{weight.shape}. A weight is [{columns}, N]: inputs times outputs."
            )
        if bias is not None and bias.shape != weight.shape[1:]:
            raise ValueError(
                f"{name} got a bias of shape {bias.shape} for a weight of shape {weight.shape}: "
                f"it should be {weight.shape[1:]}."
            )
        for array in (weight, bias):
            require_real(name, array)


def require_real(name: str, array: Array | None) -> None:
    """Raises unless the array, if there is one, has a real floating-point dtype."""
    if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name} computes with real floats, not with {array.dtype.name}.")
