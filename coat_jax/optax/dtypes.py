"""Casts of whole trees: to FP32, and to the dtypes that updates have in optax."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from coat_jax.optax.checks.trees import dtype_of


def in_fp32(tree: Any) -> Any:
    """The tree with its 16-bit floats cast to FP32; other leaves are unchanged."""

    def cast(leaf: Any) -> Any:
        dtype = dtype_of(leaf)
        narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
        return leaf.astype(jnp.float32) if narrow else leaf

    return jax.tree.map(cast, tree)


def update_dtypes(updates: optax.Updates, params: optax.Params | None) -> list[np.dtype] | None:
    """The dtype of each update: that to which it and its parameter promote, as in optax.

    None without parameters, or with those of another model, which a later check refuses.
    """
    structure: Any = jax.tree.structure(params)
    if structure != jax.tree.structure(updates):
        return None
    # result_type counts NumPy's FP64 as FP32, unless jax_enable_x64 is set.
    return [
        jnp.promote_types(jnp.result_type(g), jnp.result_type(p))
        for g, p in zip(jax.tree.leaves(updates), jax.tree.leaves(params), strict=True)
    ]


def promoted(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
    """Updates in their `update_dtypes`; as they are if there are none."""
    dtypes = update_dtypes(updates, params)
    if dtypes is None:
        return updates
    leaves, structure = jax.tree.flatten(updates)
    return jax.tree.unflatten(structure, map(jnp.astype, leaves, dtypes))
