"""Checks of the ops' arguments: each error names what arrived and what is required."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from coat_jax.errors import UserError
from coat_jax.kernels.norm import Norm


def require_real(name: str, array: Array, *, least_rank: int = 0) -> None:
    """Raises unless this is an array with a real dtype of 16 bits or more, and of this rank."""
    if not hasattr(array, "dtype"):
        raise TypeError(f"{name} takes arrays, not {type(array).__name__}.")
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name} computes with real floats, not with {array.dtype.name}.")
    if array.dtype.itemsize == 1:
        raise TypeError(
            f"{name} rounds to FP8 itself, with a scale that it computes, and got "
            f"{array.dtype.name}: the result would be in FP8, too. Pass BF16 or FP32."
        )
    if array.ndim < least_rank:
        raise ValueError(f"{name} works on the last axis of its input, and a scalar has none.")


def require_number(name: str, value: Any) -> None:
    """Raises unless a setting is a finite number that is known while a program is traced."""
    if isinstance(value, jax.core.Tracer) or not jnp.isscalar(value) or isinstance(value, str):
        raise TypeError(
            f"{name}={value!r} must be a Python number: it is fixed when a program is compiled."
        )
    if not math.isfinite(value):
        raise ValueError(f"{name}={value} must be finite.")


def require_indices(what: str, numbers: Any, end: int) -> None:
    """Raises unless all are from 0 to before `end`. Under jit they are not known, nor checked."""
    if isinstance(numbers, jax.core.Tracer):
        return
    known = np.asarray(numbers)
    for number in (known.min(initial=0), known.max(initial=0)):
        if not 0 <= number < end:
            raise UserError(f"{what} is {number}: they are from 0 to {end - 1}.")


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
