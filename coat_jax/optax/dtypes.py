"""Casts of whole trees: to FP32, and to the dtypes that updates have in optax."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from coat_jax.optax.checks.trees import dtype_of, require_real_floats


def in_fp32(tree: Any) -> Any:
    """The tree with its 16-bit floats cast to FP32; other leaves are unchanged."""

    def cast(leaf: Any) -> Any:
        dtype = dtype_of(leaf)
        narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
        return leaf.astype(jnp.float32) if narrow else leaf

    return jax.tree.map(cast, tree)


def promoted(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
    """Updates in the dtype to which they and their parameters promote, as in optax.

    Without parameters, or with those of another model, which a later check refuses, updates are
    returned as they are.
    """
    require_real_floats(updates)
    structure: Any = jax.tree.structure(params)
    if structure != jax.tree.structure(updates):
        return updates

    def cast(g: Any, p: Any) -> Any:
        # result_type counts NumPy's FP64 as FP32, unless jax_enable_x64 is set.
        return jnp.astype(g, jnp.promote_types(jnp.result_type(g), jnp.result_type(p)))

    return jax.tree.map(cast, updates, params)
