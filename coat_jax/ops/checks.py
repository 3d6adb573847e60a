"""Checks of the ops' arguments: each error names what arrived and what is required."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array

from coat_jax.kernels.norm import Norm


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


def require_columns(name: str, x: Array) -> None:
    """Raises unless `x` is an array of real floats with a last axis to work on."""
    if jnp.ndim(x) == 0:
        raise ValueError(f"{name} works on the last axis of its input, and a scalar has none.")
    require_real(name, x)


def require_real(name: str, array: Array | None) -> None:
    """Raises unless the array, if there is one, has a real floating-point dtype."""
    if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name} computes with real floats, not with {array.dtype.name}.")


def require_norm(name: str, columns: int, norm: Norm) -> None:
    """Raises unless the norm's parameters have one number per column."""
    for part in (norm.scale, norm.shift):
        if part is not None and part.shape != (columns,):
            raise ValueError(
                f"{name} got an input with {columns} columns and a norm with parameters of "
                f"shape {part.shape}: it should be ({columns},)."
            )
