"""Masks: which parameters something applies to, such as weight decay.

A mask is a tree of booleans, one for each parameter or for all of a subtree, or a function from
parameters to one, as in optax.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import keystr

from coat_jax.validation import brief

Mask = Any | Callable[[optax.Params], Any]


def checked_mask(name: str, mask: Mask | None) -> Mask | None:
    """The mask as a function that raises if its tree does not fit the parameters it gets.

    Args:
        name: of the argument, for the message.
        mask: None stays None.
    """
    return None if mask is None else lambda params: mask_of(name, mask, params)


def mask_of(name: str, mask: Mask, params: optax.Params) -> Any:
    """The tree of booleans of these parameters, one for each."""
    tree = mask(params) if is_mask_function(mask) else mask
    _require_booleans(name, tree)
    try:
        return jax.tree.broadcast(tree, params)
    except ValueError:
        raise ValueError(
            f"{name} does not fit the parameters: it is {jax.tree.structure(tree)}, and they are "
            f"{jax.tree.structure(params)}. It needs True or False for each, or for all of a "
            f"subtree; a function fits any: {name}=lambda params: jax.tree.map(lambda p: p.ndim > "
            "1, params)."
        ) from None


def is_mask_function(mask: Any) -> bool:
    """Whether a mask is a function, rather than a tree that can be called, such as a module."""
    leaves = jax.tree.leaves(mask)
    return bool(leaves) and all(callable(one) and not isinstance(one, type) for one in leaves)


def _require_booleans(name: str, tree: Any) -> None:
    for path, flag in jax.tree.leaves_with_path(tree):
        is_bool = isinstance(flag, bool) or getattr(flag, "dtype", None) == jnp.bool_
        if not is_bool or np.shape(flag):
            raise TypeError(
                f"{name}{keystr(path)}={brief(flag)} must be True or False: a mask is "
                "a tree of booleans, or a function from parameters to one."
            )


def is_left_out(node: Any) -> bool:
    """Whether a node stands where optax.masked or optax.partition leaves a parameter out."""
    return isinstance(node, optax.MaskedNode)


def leaves_some_out(state: Any) -> bool:
    """Whether a state was made by a transformation that leaves parameters out."""
    return any(map(is_left_out, jax.tree.leaves(state, is_leaf=is_left_out)))
