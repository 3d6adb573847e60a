"""Dtypes of trees of parameters, gradients and states: casts, and checks of dtypes and shapes."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

NARROW = (jnp.bfloat16, jnp.float16)
GRADIENTS = "The gradients must have the tree and shapes of the parameters."
OTHER_STATE = (
    "The state was made by another optimizer, for other parameters, or with another Storage. Make "
    "it with init(params), or use the Storage that it was made with."
)


def in_fp32(tree: Any) -> Any:
    """The tree with its 16-bit floats cast to FP32; other leaves are unchanged."""
    return jax.tree.map(
        lambda leaf: leaf.astype(jnp.float32) if jnp.result_type(leaf) in NARROW else leaf, tree
    )


def update_dtypes(updates: optax.Updates, params: optax.Params | None) -> list[np.dtype]:
    """The dtype of each update: that to which it and its parameter promote, as in optax.

    Its own without parameters, or with those of another model, which a later check refuses.
    """
    structure: Any = jax.tree.structure(params)
    others = params if structure == jax.tree.structure(updates) else updates
    # result_type counts NumPy's FP64 as FP32, unless jax_enable_x64 is set.
    return [
        jnp.promote_types(jnp.result_type(g), jnp.result_type(p))
        for g, p in zip(jax.tree.leaves(updates), jax.tree.leaves(others), strict=True)
    ]


def require_floats(tree: Any, *also: Any) -> None:
    """Raises unless each leaf is a real float of 16 bits or more, or has one of these dtypes."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        dtype = jnp.result_type(leaf)
        if any(jnp.issubdtype(dtype, kind) for kind in also):
            continue
        if dtype == jax.dtypes.float0:
            remedy = "It is float0, as JAX has for integers: pass jnp.zeros_like(parameter)."
        elif jnp.issubdtype(dtype, jnp.complexfloating):
            remedy = "Wrap the optimizer in optax.contrib.split_real_and_imaginary."
        elif not jnp.issubdtype(dtype, jnp.floating):
            remedy = "Only floats are optimized: leave it out with optax.masked or optax.partition."
        elif dtype.itemsize == 1:
            remedy = "Updates would be lost in it: keep parameters and gradients in BF16 or FP32."
        else:
            continue
        where = jax.tree_util.keystr(path) or "the parameter"
        raise TypeError(f"{where} has dtype {dtype.name}. {remedy}")


def require_like(name: str, tree: Any, wanted: Any, advice: str, *, dtypes: bool = True) -> None:
    """Raises unless the leaves of a tree have the paths, shapes and dtypes of those of `wanted`."""
    found, expected = (
        {
            jax.tree_util.keystr(path): (
                f"{jnp.result_type(leaf).name if dtypes else ''}{list(jnp.shape(leaf))}"
            )
            for path, leaf in jax.tree.leaves_with_path(one)
        }
        for one in (tree, wanted)
    )
    for path in [*expected, *found]:
        if path not in found or path not in expected:
            differs = f"is {'not expected' if path in found else 'missing'}"
        elif found[path] != expected[path]:
            differs = f"is {found[path]} instead of {expected[path]}"
        else:
            continue
        raise ValueError(f"{name}{path} {differs}. {advice}")


@contextlib.contextmanager
def explaining_states(init: Callable[[Any], Any], state: Any, params: Any) -> Iterator[None]:
    """Explains an error within, if the state differs from what `init(params)` makes."""
    try:
        yield
    except (AttributeError, TypeError, ValueError) as error:
        try:
            wanted = jax.eval_shape(init, params)
        except Exception:  # some `init` need numbers, not only shapes
            raise error from None
        require_like("state", state, wanted, OTHER_STATE)
        raise
