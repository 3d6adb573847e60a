"""How an optimizer's state is sharded: every leaf as its parameter is.

The codes of a moment have their parameter's shape, and its scales one number per group of
the last axis, so a parameter's PartitionSpec fits both; only where the mesh divides
the last axis inside a group, the last axis of the scales is not sharded.

Flax's modules can carry the names of mesh axes beside their arrays: `nnx.Variable` as metadata,
`nn.Partitioned` and `nn.LogicallyPartitioned` as boxes. A state made from such parameters inherits
these annotations, and trainers (`nnx.Optimizer`, MaxText) shard the state by them. `fit_metadata`
removes from them the axes that do not fit the scales.
"""

import sys
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

# Metadata of an nnx.Variable. `sharding_names` is an earlier name of `out_sharding`. MaxText's
# stacked layers have both, and where Flax copies annotations to a state, the earlier one would win.
ANNOTATIONS = ("out_sharding", "optimizer_sharding", "sharding_names")


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


def fit_metadata(tree: Any, params: Any) -> Any:
    """Returns `tree`, a state leaf for each parameter, with annotations that fit its shapes.

    An axis as long as its parameter's keeps its name. Any other axis loses its name in a box, whose
    names the user maps to mesh axes later. In an nnx.Variable it keeps a name that the mesh of
    `jax.set_mesh` has if the mesh axis divides it. A name that the mesh does not have is mapped to
    mesh axes later (MaxText), or the mesh is not set yet: the axis then keeps it if the number of
    all devices divides the axis, because then any mesh does.
    """

    def fit(box: Any, param: Any) -> Any:
        if not _is_box(box) or len(jax.tree.leaves(box)) != 1:
            return box
        size, param_size = (tuple(jax.tree.leaves(tree)[0].shape) for tree in (box, param))
        same_rank = len(size) == len(param_size)
        equal = [same_rank and n == m for n, m in zip(size, param_size, strict=False)]
        if not isinstance(box, _flax_types("flax.nnx", "Variable")):
            return box.replace(names=_restricted(box.names, equal))
        metadata = box.get_metadata()
        fitted = {}
        for name in ANNOTATIONS:
            axes = metadata.get(name)
            if isinstance(axes, tuple | jax.sharding.PartitionSpec):
                fits = [_may_divide(axis, n) for axis, n in zip(axes, size, strict=False)]
                keep = [a or b for a, b in zip(equal, fits, strict=False)]
                fitted[name] = _restricted(axes, keep)
        return box.copy(**fitted) if fitted else box

    return jax.tree.map(fit, tree, params, is_leaf=_is_box)


def _is_box(node: Any) -> bool:
    boxes = _flax_types("flax.nnx", "Variable") + _flax_types("flax.core.meta", "Partitioned")
    return isinstance(node, boxes)


def _flax_types(module: str, name: str) -> tuple[Any, ...]:
    """A tuple with a class of Flax; empty until the user imports Flax, which takes a second."""
    return (getattr(sys.modules[module], name),) if module in sys.modules else ()


def _restricted(axes: Any, keep: list[bool]) -> Any:
    """The names of axes, None where `keep` is false, in a container like theirs."""
    names = [axis if stays else None for axis, stays in zip(axes, keep, strict=False)]
    return tuple(names) if isinstance(axes, tuple) else type(axes)(*names)


def _may_divide(axis: Any, size: int) -> bool:
    """Whether these axes can be sharded: on the mesh that is set, or on any mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    known = all(name in mesh.shape for name in jax.tree.leaves(axis))
    return size % (mesh_axes.shards(axis, mesh) if known else jax.device_count()) == 0
