"""Checks of the arguments of the functions that make optimizers.

Numbers computed inside a traced function are only checked to be scalars: their values are not
known yet.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from coat_jax.kernels.adam import Number
from coat_jax.kernels.dispatch import Implementation
from coat_jax.storage import DIRECTION, Storage
from coat_jax.validation import brief, require

RANGES = {
    "learning_rate": (0.0, float("inf")),
    "b1": (0.0, 1.0),
    "b2": (0.0, 1.0),
    "beta": (0.0, 1.0),
    "eps": (0.0, float("inf")),
    "eps_root": (0.0, float("inf")),
    "weight_decay": (0.0, float("inf")),
    "consistent_rms": (0.0, float("inf")),
    "max_norm": (1e-30, float("inf")),  # 0 would make every gradient zero
}
MAY_BE_SCHEDULES = ("learning_rate", "weight_decay")


def require_numbers(**arguments: Any) -> None:
    """Raises unless these are real scalars, in their RANGES if known; or schedules, if they may be.

    Arguments of Adam in `fp8_muon` begin with "adam_".
    """
    for name, value in arguments.items():
        bare = name.removeprefix("adam_")
        if bare in MAY_BE_SCHEDULES and is_function(value):
            continue
        if not _is_scalar(value):
            schedule = " or a schedule (a function of the step count)"
            also = schedule if bare in MAY_BE_SCHEDULES else ""
            raise TypeError(f"{name}={brief(value)} must be a number{also}.")
        known = _known(value) if bare in RANGES else None
        low, high = RANGES.get(bare, (0.0, 0.0))
        if known is not None and not low <= known < high:
            narrow = getattr(value, "dtype", None) in (jnp.bfloat16, jnp.float16)
            advice = " Pass hyperparam_dtype=jnp.float32 to optax.inject_hyperparams."
            raise ValueError(
                f"{name}={known!r} is outside its range, {low:g} <= {name} < {high:g}."
                f"{advice if narrow else ''}"
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


def checked_schedule(name: str, value: optax.ScalarOrSchedule) -> optax.ScalarOrSchedule:
    """A number as it is, or a schedule that raises unless its values are numbers."""
    return partial(value_at, name, value) if is_function(value) else value


def value_at(name: str, value: optax.ScalarOrSchedule, count: ArrayLike) -> Number:
    """The value of a number or a schedule at a step."""
    if not is_function(value):
        return value
    now = value(count)
    if hasattr(now, "__jax_array__"):  # of Flax's nnx.Variable, for instance
        now = jnp.asarray(now)
    if not _is_scalar(now):
        raise TypeError(
            f"{name}(count)={brief(now)} must be a number. A schedule returns one number for each "
            "step: a float, or a real array of shape ()."
        )
    return now


def require_flag(name: str, value: Any) -> None:
    """Raises unless `value` is a Python boolean or a boolean array without axes."""
    if isinstance(value, bool):
        return
    if getattr(value, "shape", None) != () or value.dtype != bool:
        raise TypeError(
            f"{name}={brief(value)} must be True, False or one boolean in an array of shape ()."
        )


def require_settings(
    *, storage: Any, implementation: Any = None, mu_dtype: Any = None, **flags: Any
) -> None:
    """Raises unless these arguments have the right types and all `flags` are booleans."""
    require("storage", storage, Storage | None)
    require("implementation", implementation, Implementation | None)
    if mu_dtype is not None:
        raise ValueError(
            f"mu_dtype={brief(mu_dtype)}: the first moment is stored in 8 bits. Leave mu_dtype "
            "out; storage=coat_jax.Storage(first=...) chooses among the formats."
        )
    for name, value in flags.items():
        require(name, value, bool)


def is_function(value: Any) -> bool:
    """Whether `value` can be a schedule; a dtype is callable, too, but is a class."""
    return callable(value) and not isinstance(value, type)


def _is_scalar(value: Any) -> bool:
    if isinstance(value, bool | np.bool_):
        return False
    if isinstance(value, int | float):
        return True
    if not isinstance(value, np.generic | np.ndarray | jax.Array) or value.shape:
        return False
    return jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer)


def _known(value: Any) -> float | None:
    """The value of a scalar, unless it is computed in the program."""
    if isinstance(value, jax.core.Tracer):
        return None
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return None
    return value if isinstance(value, int | float) else float(value)
