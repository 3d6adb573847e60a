"""How an optimizer's state is sharded: every leaf as its parameter is.

The codes of a moment have their parameter's shape, and its scales one number per group of
the last axis, so a parameter's PartitionSpec fits both; only where the mesh divides
the last axis inside a group, the last axis of the scales is not sharded.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array

from coat_jax.numerics import mesh_axes
from coat_jax.numerics.expansion import GROUP_SIZE
from coat_jax.optax.states.following import param_of_leaf
from coat_jax.optax.states.host_memory import host_sharding, is_on_host
from coat_jax.storage import GROUP_SIZES, Storage


def state_shardings(tx: optax.GradientTransformation, params: optax.Params) -> Any:
    """The shardings of `tx.init(params)`, as a tree of the same structure.

    Use it where the state is made under jit, which cannot see how the parameters are sharded:

        state = jax.jit(tx.init, out_shardings=coat.optax.state_shardings(tx, params))(params)

    A leaf whose path ends with a parameter's path, and that has as many axes, is sharded as that
    parameter is. Every other leaf is replicated. Leaves that `in_host_memory` keeps in the memory
    of the hosts are sharded over the hosts' memories in the same way.

    Args:
        tx: any optax transformation, or an optimizer with a step of its own.
        params: sharded arrays, or `jax.ShapeDtypeStruct`s with NamedShardings.
    """
    require_named_shardings(params)
    if not jax.tree.leaves(params):
        raise ValueError("params has no leaves, and so no mesh that the state could be on.")
    mesh = jax.tree.leaves(params)[0].sharding.mesh
    traced, state = jax.make_jaxpr(tx.init, return_shape=True)(params)
    leaves, structure = jax.tree.flatten(state)
    shardings = [
        NamedSharding(mesh, PartitionSpec())
        if param is None or len(param.shape) != len(leaf.shape)
        else sharding_like(param, leaf.shape)
        for leaf, param in zip(leaves, param_of_leaf(state, params), strict=True)
    ]
    placed = [
        host_sharding(sharding) if is_on_host(leaf) else sharding
        for sharding, leaf in zip(shardings, traced.out_avals, strict=True)
    ]
    return jax.tree.unflatten(structure, placed)


def fitting_group_size(params: optax.Params, *, min_size: int = Storage.min_size) -> int:
    """The largest group size up to 128 with which every device holds whole groups.

    Use it where scales must take their parameter's own PartitionSpec, or to keep a step from
    communicating:

        storage = coat.Storage(group_size=coat.optax.fitting_group_size(params))

    Args:
        params: arrays or `jax.ShapeDtypeStruct`s with NamedShardings.
        min_size: as in `Storage`; smaller leaves are stored in FP32 and have no groups.
    """
    require_named_shardings(params)
    sizes = [size for size in GROUP_SIZES if size <= GROUP_SIZE]
    for path, leaf in jax.tree.leaves_with_path(params):
        if not Storage(min_size=min_size).quantizes(leaf.shape) or not leaf.shape:
            continue
        columns = leaf.shape[-1]
        parts = columns // leaf.sharding.shard_shape(leaf.shape)[-1]
        if parts > 1:
            sizes = [size for size in sizes if columns // parts % size == 0]
        if not sizes:
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} has {columns} columns, sharded into {parts} "
                f"parts of {columns // parts}. No group size from {GROUP_SIZES[0]} to "
                f"{GROUP_SIZE} divides these for all parameters: shard another axis."
            )
    return max(sizes)


def require_named_shardings(params: optax.Params) -> None:
    """Raises unless every parameter is on a mesh."""
    for path, leaf in jax.tree.leaves_with_path(params):
        if not isinstance(getattr(leaf, "sharding", None), NamedSharding):
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} has no NamedSharding. Place the parameters "
                "on a mesh first, or pass jax.ShapeDtypeStruct(shape, dtype, sharding=...)."
            )


def full(param: Any, shape: tuple[int, ...], dtype: DTypeLike, value: int = 0) -> Array:
    """A leaf of the state with one value, placed where the parameter is if that can be seen."""
    sharding = _visible_sharding(param)
    if isinstance(sharding, NamedSharding):
        sharding = sharding_like(param, shape)
    leaf = jnp.full(shape, value, dtype, device=sharding)
    return mesh_axes.varying_like(leaf, param) if isinstance(param, jax.core.Tracer) else leaf


def _visible_sharding(param: Any) -> Any:
    """The sharding that the user gave a parameter; None under jit on automatic axes."""
    if isinstance(param, jax.core.Tracer):
        sharding = jax.typeof(param).sharding
        explicit = any(kind == AxisType.Explicit for kind in sharding.mesh.axis_types)
        return sharding if explicit else None
    # A leaf placed for a parameter that JAX placed by itself would make jit compile twice.
    return param.sharding if isinstance(param, jax.Array) and param.committed else None


def sharding_like(param: Any, shape: tuple[int, ...]) -> NamedSharding:
    """The parameter's sharding for a leaf of its state, without axes that it does not divide."""
    sharding = jax.typeof(param).sharding if isinstance(param, jax.core.Tracer) else param.sharding

    spec = [
        entry if size % mesh_axes.shards(entry, sharding.mesh) == 0 else None
        for entry, size in zip(sharding.spec, shape, strict=False)
    ]
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))
