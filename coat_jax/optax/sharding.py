"""How an optimizer's state is sharded: every leaf as its parameter is.

The codes of a moment have their parameter's shape, and its scales one number per group of
the last axis, so a parameter's PartitionSpec fits both; only a last axis that the mesh cuts
inside a group leaves the scales' last axis whole.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array


def state_shardings(tx: optax.GradientTransformation, params: optax.Params) -> Any:
    """The shardings of `tx.init(params)`, as a tree of the same structure.

    `params` are sharded arrays, or `jax.ShapeDtypeStruct`s with shardings. Use it where the
    state is made under jit, which cannot see how the parameters are sharded:

        state = jax.jit(tx.init, out_shardings=coat.optax.state_shardings(tx, params))(params)
    """
    for path, leaf in jax.tree.leaves_with_path(params):
        if not isinstance(getattr(leaf, "sharding", None), NamedSharding):
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} has no NamedSharding. Place the parameters "
                "on a mesh first, or pass jax.ShapeDtypeStruct(shape, dtype, sharding=...)."
            )
    mesh = jax.tree.leaves(params)[0].sharding.mesh
    state = jax.eval_shape(tx.init, params)
    return optax.tree_map_params(
        tx,
        lambda leaf, param: sharding_like(param, leaf.shape),
        state,
        params,
        transform_non_params=lambda _: NamedSharding(mesh, PartitionSpec()),
    )


def zeros(param: Any, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Zeros for a leaf of the state, placed where the parameter is if that can be seen."""
    sharding = getattr(param, "sharding", None) if isinstance(param, jax.Array) else None
    if isinstance(param, jax.core.Tracer):
        sharding = getattr(jax.typeof(param), "sharding", None)
        if sharding is None or sharding.mesh.empty or not sharding.mesh._any_axis_explicit:
            return jnp.zeros(shape, dtype)
    if isinstance(sharding, NamedSharding):
        sharding = sharding_like_spec(sharding, shape)
    return jnp.zeros(shape, dtype, device=sharding)


def sharding_like(param: Any, shape: tuple[int, ...]) -> NamedSharding:
    """The parameter's sharding for a leaf of its state."""
    return sharding_like_spec(param.sharding, shape)


def sharding_like_spec(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """`sharding` for another shape of the same rank, without axes that it does not divide."""

    def parts(entry: Any) -> int:
        names = () if entry is None else (entry,) if isinstance(entry, str) else entry
        return math.prod(sharding.mesh.shape[name] for name in names)

    spec = [
        entry if size % parts(entry) == 0 else None
        for entry, size in zip(sharding.spec, shape, strict=False)
    ]
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))
