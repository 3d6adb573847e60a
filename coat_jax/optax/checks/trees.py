"""Checks of the parameters, gradients and states that optimizers get."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax


def dtype_of(leaf: Any) -> Any:
    """The dtype of a leaf of a state: an array, a typed random key or a Python number."""
    return leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)


def is_fp8(leaf: Any) -> bool:
    """Whether a leaf holds FP8 codes."""
    dtype = dtype_of(leaf)
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 1


def require_real_floats(params: Any) -> None:
    """Raises unless every parameter is a real floating-point array."""
    for path, leaf in jax.tree.leaves_with_path(params):
        require_real_float(jax.tree_util.keystr(path) or "the parameter", leaf)


def require_real_float(where: str, leaf: Any) -> None:
    """Raises unless a parameter is a real floating-point array."""
    dtype = dtype_of(leaf)
    if dtype == jax.dtypes.float0:
        remedy = "It is float0, as JAX has for integers: pass jnp.zeros_like(parameter)."
    elif jnp.issubdtype(dtype, jnp.complexfloating):
        remedy = "Wrap the optimizer in optax.contrib.split_real_and_imaginary."
    elif not jnp.issubdtype(dtype, jnp.floating):
        remedy = "Only floats are optimized: leave it out with optax.masked or optax.partition."
    elif dtype.itemsize == 1:
        remedy = "Updates would be lost in it: keep parameters and gradients in BF16 or FP32."
    else:
        return
    raise TypeError(f"{where} has dtype {dtype.name}. {remedy}")


def require_state_of(kind: type, state: Any) -> None:
    """Raises unless the state is of this kind."""
    if not isinstance(state, kind):
        raise TypeError(
            f"The state is a {type(state).__name__} instead of a {kind.__name__}: another "
            "optimizer made it. Make it with init(params)."
        )


def require_state(state: Any, wanted: Any) -> None:
    """Raises unless the state has the leaves, shapes and dtypes of `wanted`, which `init` makes."""
    found = difference("state", state, wanted)
    if found is not None:
        raise ValueError(
            f"{found}. The state, of type {type(state).__name__}, was made by another optimizer, "
            "for other parameters, or with another Storage. Make it with init(params), or use the "
            "Storage that it was made with."
        )


@contextlib.contextmanager
def explaining_states(tx: optax.GradientTransformation, state: Any, params: Any) -> Iterator[None]:
    """Explains an error within, if the state differs from what `tx.init(params)` makes."""
    try:
        yield
    except (AttributeError, TypeError, ValueError) as error:
        try:
            wanted = jax.eval_shape(tx.init, params)
        except Exception:  # some `init` need numbers, not only shapes
            raise error from None
        require_state(state, wanted)
        raise


def require_same_shapes(name: str, tree: Any, like: Any) -> None:
    """Raises unless the leaves of `tree` have the paths and shapes of those of `like`."""
    found = difference(name, tree, like, lambda leaf: str(list(jnp.shape(leaf))))
    if found is not None:
        raise ValueError(f"{found}: the {name} must have the tree and shapes of the parameters.")


def difference(
    name: str, tree: Any, wanted: Any, describe: Callable[[Any], str] | None = None
) -> str | None:
    """Where a tree differs from another one, by default in paths, shapes or dtypes."""
    describe = describe or (lambda leaf: f"{dtype_of(leaf).name}{list(jnp.shape(leaf))}")
    found, expected = (
        {jax.tree_util.keystr(path): describe(x) for path, x in jax.tree.leaves_with_path(one)}
        for one in (tree, wanted)
    )
    for path in [*expected, *found]:
        if path not in found or path not in expected:
            return f"{name}{path} is {'not expected' if path in found else 'missing'}"
        if found[path] != expected[path]:
            return f"{name}{path} is {found[path]} instead of {expected[path]}"
    return None
