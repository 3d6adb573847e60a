"""Checks of the ops' arguments: each error names what arrived and what is required."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from coat_jax.errors import UserError
from coat_jax.kernels import routing
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


def require_indices(what: str, numbers: Any, end: int) -> Int32[Array, "..."]:
    """Returns these numbers; raises unless all are from 0 to before `end`.

    Under jit they are not known and are clipped, so that kernels read no memory of others.
    """
    if isinstance(numbers, jax.core.Tracer):
        return jnp.clip(numbers, 0, end - 1).astype(jnp.int32)
    known = np.asarray(numbers)
    for number in (known.min(initial=0), known.max(initial=0)):
        if not 0 <= number < end:
            raise UserError(f"{what} is {number}: they are from 0 to {end - 1}.")
    return jnp.asarray(known, jnp.int32)


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


def require_experts(
    x: Array, gate: Array, up: Array, down: Array, experts: Array, weights: Array
) -> None:
    """Raises unless these arguments of `grouped_mlp` have the right dtypes and shapes."""
    for array in (x, gate, up, down, weights):
        require_real("grouped_mlp", array)
    if not jnp.issubdtype(experts.dtype, jnp.integer):
        raise TypeError(f"experts are numbers of experts, integers, not {experts.dtype.name}.")
    fits = x.ndim == 2 and gate.ndim == 3 and gate.shape[1] == x.shape[1] and gate.shape[0] > 0
    if not fits or up.shape != gate.shape or down.shape != (*gate.shape[::2], x.shape[1]):
        raise ValueError(
            f"grouped_mlp takes x [T, D], gate and up [E, D, F] and down [E, F, D], not x "
            f"{list(x.shape)}, gate {list(gate.shape)}, up {list(up.shape)} and down "
            f"{list(down.shape)}."
        )
    if experts.ndim != 2 or len(experts) != len(x) or weights.shape != experts.shape:
        raise ValueError(
            f"experts {list(experts.shape)} and weights {list(weights.shape)} must be [{len(x)}, "
            "k]: one for each choice of each token."
        )


def require_choices(experts: Array, tokens: int, count: int, aligned: int) -> None:
    """Raises unless tokens may have so many of `count` experts, with rows that fit 32 bits."""
    choices = experts.shape[1]
    if not 1 <= choices <= count:
        raise UserError(f"each token chooses {choices} experts: it must be from 1 to {count}.")
    if routing.rows_of(tokens * choices, count, aligned) > routing.MOST_ROWS:
        raise UserError(
            f"{tokens} tokens with {choices} experts each are more rows than 32 bits count, "
            f"{routing.MOST_ROWS}. Use more microbatches, or more devices."
        )
