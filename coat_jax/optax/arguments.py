"""Checks of the arguments of optimizers and their steps.

Numbers computed inside a traced function are only checked to be scalars: their values are not
known yet.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coat_jax.kernels.adam import Number
from coat_jax.storage import DIRECTION, Storage
from coat_jax.validation import brief

BELOW_ONE = ("b1", "b2", "beta")
MAY_BE_SCHEDULES = ("learning_rate", "weight_decay")


def require_numbers(**arguments: Any) -> None:
    """Raises unless these are real scalars in their ranges; or schedules, if they may be.

    Arguments of Adam in `fp8_muon` begin with "adam_".
    """
    for name, value in arguments.items():
        bare = name.removeprefix("adam_")
        if bare in MAY_BE_SCHEDULES and callable(value):
            continue
        if not _is_scalar(value, jnp.floating, jnp.integer):
            also = " or a schedule (a function of the step count)"
            raise TypeError(
                f"{name}={brief(value)} must be a number{also if bare in MAY_BE_SCHEDULES else ''}."
            )
        # A largest norm of 0 would make every gradient zero.
        low, high = 1e-30 if name == "max_norm" else 0, 1 if bare in BELOW_ONE else math.inf
        known = _known(value)
        if known is not None and not low <= known < high:
            narrow = getattr(value, "dtype", None) in (jnp.bfloat16, jnp.float16)
            advice = " Pass hyperparam_dtype=jnp.float32 to optax.inject_hyperparams."
            raise ValueError(
                f"{name}={known!r} is outside its range, {low:g} <= {name} < {high:g}."
                f"{advice if narrow else ''}"
            )


def require_step_arguments(grad_scale: Any, skip: Any) -> None:
    """Raises unless the arguments of a step are a number and a boolean; arrays would broadcast."""
    if not _is_scalar(grad_scale, jnp.floating, jnp.integer):
        raise TypeError(f"grad_scale={brief(grad_scale)} must be a number.")
    if not _is_scalar(skip, jnp.bool_):
        raise TypeError(
            f"skip={brief(skip)} must be True, False or one boolean in an array of shape ()."
        )


def refuse_mu_dtype(mu_dtype: Any) -> None:
    """Raises unless the dtype of first moments, as optax has it, is left out."""
    if mu_dtype is not None:
        raise ValueError(
            f"mu_dtype={brief(mu_dtype)}: the first moment is stored in 8 bits. Leave mu_dtype "
            "out; storage=coat_jax.Storage(first=...) chooses among the formats."
        )


def require_b2_for_b1(b1: Number, b2: Number, storage: Storage, params: Any) -> None:
    """Raises if a first moment that is stored as m / sqrt(v) lasts too much longer than v."""
    first, second = _known(b1), _known(b2)
    if first is None or second is None or storage.first != DIRECTION or second >= least_b2(first):
        return
    if any(storage.quantizes(jnp.shape(leaf)) for leaf in jax.tree.leaves(params)):
        raise ValueError(
            f"b2={b2!r} with b1={b1!r}: the first moment is stored relative to the root of the "
            f"second, which decays faster: b2 must be at least {least_b2(first):g}. Use "
            "storage=coat_jax.Storage(first=coat_jax.E4M3), or a larger b2."
        )


def least_b2(b1: float) -> float:
    """The smallest b2 beside which first moments can be stored as m / sqrt(v).

    While an element has no gradients, m / sqrt(v) grows by b1 / sqrt(b2) a step, until v is 2^-36
    of the largest in its group, the smallest that is stored. With this b2 it grows 4 times by then.
    The group has one scale, so the codes of all its elements would be as much coarser. The number
    has as many digits as errors show.
    """
    return round(b1**2.25, 6)


def _is_scalar(value: Any, *kinds: Any) -> bool:
    if not isinstance(value, int | float | np.generic | np.ndarray | jax.Array) or np.shape(value):
        return False
    return any(jnp.issubdtype(jnp.result_type(value), kind) for kind in kinds)


def _known(value: Any) -> float | None:
    """The value of a scalar, unless it is computed in the program."""
    if isinstance(value, jax.core.Tracer):
        return None
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return None
    return value if isinstance(value, int | float) else float(value)
