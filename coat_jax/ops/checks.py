"""Checks of the ops' arguments: each error names what arrived and what is required."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from coat_jax.kernels.norm import Norm


def require_columns(name: str, x: Array) -> None:
    """Raises unless `x` is an array of real floats with a last axis to work on."""
    require_real(name, x)
    if x.ndim == 0:
        raise ValueError(f"{name} works on the last axis of its input, and a scalar has none.")


def require_real(name: str, array: Array) -> None:
    """Raises unless this is an array with a real dtype of 16 bits or more."""
    require_array(name, array)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name} computes with real floats, not with {array.dtype.name}.")
    if array.dtype.itemsize == 1:
        raise TypeError(
            f"{name} rounds to FP8 itself, with a scale that it computes, and got "
            f"{array.dtype.name}: the result would be in FP8, too. Pass BF16 or FP32."
        )


def require_array(name: str, value: Any) -> None:
    """Raises unless a value is an array; JAX takes no lists for arrays, either."""
    if not hasattr(value, "dtype"):
        raise TypeError(f"{name} takes arrays, not {type(value).__name__}.")


def require_integers(name: str, array: Array) -> None:
    """Raises unless this is an array of whole numbers."""
    require_array(name, array)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} are whole numbers, not {array.dtype.name}.")


def require_number(name: str, value: Any) -> None:
    """Raises unless a setting is a finite number that is known while a program is traced."""
    if isinstance(value, jax.core.Tracer) or not jnp.isscalar(value) or isinstance(value, str):
        raise TypeError(
            f"{name}={value!r} must be a Python number: it is fixed when a program is compiled."
        )
    if not math.isfinite(value):
        raise ValueError(f"{name}={value} must be finite.")


def require_norm(name: str, columns: int, norm: Norm) -> None:
    """Raises unless `norm` is a `Norm` whose parameters have one number per column."""
    if not isinstance(norm, Norm):
        remedy = "its as_op_norm()" if hasattr(norm, "as_op_norm") else "coat.ops.Norm(scale)"
        raise TypeError(f"{name} takes a coat.ops.Norm, not {type(norm).__name__}: pass {remedy}.")
    for part in (norm.scale, norm.shift):
        if part is None:
            continue
        require_real(name, part)
        if part.shape != (columns,):
            raise ValueError(
                f"{name} got an input with {columns} columns and a norm with parameters of "
                f"shape {part.shape}: it should be ({columns},)."
            )
