"""What an optimizer refuses, before any work is lost."""

from typing import Any

import jax
import jax.numpy as jnp

from coat_jax.kernels.adam import Hyper


def require_real_floats(params: Any) -> None:
    """Raises unless every parameter is a real floating-point array."""
    for path, leaf in jax.tree.leaves_with_path(params):
        dtype = jnp.result_type(leaf)
        where = jax.tree_util.keystr(path) or "the parameter"
        if jnp.issubdtype(dtype, jnp.complexfloating):
            raise TypeError(
                f"{where} is complex ({dtype.name}), which FP8 moments cannot follow. Wrap the "
                "optimizer in optax.contrib.split_real_and_imaginary."
            )
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"{where} has dtype {dtype.name}; only floats are optimized. Leave it out with "
                "optax.masked or optax.partition."
            )


def require_same_shapes(name: str, tree: Any, codes: Any) -> None:
    """Raises unless `tree` has the structure and shapes of `codes`, the state's or parameters'."""
    expected: Any = jax.tree.structure(codes)
    got: Any = jax.tree.structure(tree)
    if expected != got:
        raise ValueError(
            f"The {name} have another structure than the parameters the state was made for.\n"
            f"  state: {expected}\n  {name}: {got}\n"
            "Make the state with tx.init(params) from the parameters that are differentiated."
        )
    for (path, leaf), stored in zip(
        jax.tree.leaves_with_path(tree), jax.tree.leaves(codes), strict=True
    ):
        if jnp.shape(leaf) != stored.shape:
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)} has shape {jnp.shape(leaf)}, but its state "
                f"was made for {stored.shape}. Make the state anew with tx.init(params)."
            )


def require_sensible(hyper: Hyper) -> None:
    """Raises for numbers outside their range; those computed in the program are not known yet."""
    ranges = {
        "learning_rate": (0.0, float("inf")),
        "b1": (0.0, 1.0),
        "b2": (0.0, 1.0),
        "eps": (0.0, float("inf")),
        "eps_root": (0.0, float("inf")),
        "weight_decay": (0.0, float("inf")),
    }
    for name, (low, high) in ranges.items():
        value = getattr(hyper, name)
        if isinstance(value, int | float) and not low <= value < high:
            raise ValueError(
                f"{name}={value!r} is outside its range, {low:g} <= {name} < {high:g}."
            )
