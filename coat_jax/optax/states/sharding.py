"""How an optimizer's state follows its parameters: which leaf belongs to which, and its sharding.

    params  ['layer']['w']          state  [0].mu['layer']['w']

Optimizers build their moments by mapping over the parameters, even where `optax.masked` or
`optax.partition` leave some out, so the path of a moment ends with the path of its parameter.

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
from coat_jax.optax.states.host_memory import host_sharding, is_on_host
from coat_jax.storage import GROUP_SIZES, Storage

# Metadata of an nnx.Variable. `sharding_names` is an earlier name of `out_sharding`. MaxText's
# stacked layers have both, and where Flax copies annotations to a state, the earlier one would win.
ANNOTATIONS = ("out_sharding", "optimizer_sharding", "sharding_names")


def followed_indices(state: Any, params: optax.Params) -> list[int | None]:
    """For each leaf of `state` the index of the parameter that it follows, or None.

    That is the parameter whose path is the longest ending of the leaf's path. A scalar whose path
    ends like a parameter's may be a counter or a setting. It never follows an array; and it follows
    one of several parameters only if the same subtree has leaves for others.
    """
    named = jax.tree.leaves_with_path(optimized(params))
    by_path = {path: index for index, (path, _) in enumerate(named)}
    paths = {path for path, _ in jax.tree.leaves_with_path(state, is_leaf=_is_left_out)}
    indices: list[int | None] = []
    for path, leaf in jax.tree.leaves_with_path(state):
        starts = (start for start in range(len(path) + 1) if path[start:] in by_path)
        start = next(starts, None)
        index = None if start is None else by_path[path[start:]]
        if index is not None and jnp.ndim(leaf) == 0:
            beside = (path[:start] + other for other, _ in named if other != path[start:])
            alone = len(named) > 1 and paths.isdisjoint(beside)
            if alone or jnp.ndim(named[index][1]) > 0:
                index = None
        indices.append(index)
    return indices


def optimized(params: optax.Params) -> optax.Params:
    """The parameters that have gradients: with optax.lookahead, the fast copy."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def leaves_some_out(state: Any) -> bool:
    """Whether a state was made by a transformation that leaves parameters out."""
    return any(map(_is_left_out, jax.tree.leaves(state, is_leaf=_is_left_out)))


def _is_left_out(node: Any) -> bool:
    """Whether a node stands where optax.masked or optax.partition leaves a parameter out."""
    return isinstance(node, optax.MaskedNode)


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
    _require_named_shardings(params)
    named = jax.tree.leaves(optimized(params))
    if not named:
        raise ValueError("params has no leaves, and so no mesh that the state could be on.")
    traced, state = jax.make_jaxpr(tx.init, return_shape=True)(params)
    leaves, structure = jax.tree.flatten(state)
    for i, (aval, index) in enumerate(
        zip(traced.out_avals, followed_indices(state, params), strict=True)
    ):
        sharding = NamedSharding(named[0].sharding.mesh, PartitionSpec())
        if index is not None and len(named[index].shape) == len(aval.shape):
            sharding = _sharding_like(named[index].sharding, aval.shape)
        leaves[i] = host_sharding(sharding) if is_on_host(aval) else sharding
    return jax.tree.unflatten(structure, leaves)


def fitting_group_size(params: optax.Params, *, min_size: int = Storage.min_size) -> int:
    """The largest group size up to 128 with which every device holds whole groups.

    Use it where scales must take their parameter's own PartitionSpec, or to keep a step from
    communicating:

        storage = coat.Storage(group_size=coat.optax.fitting_group_size(params))

    Args:
        params: arrays or `jax.ShapeDtypeStruct`s with NamedShardings.
        min_size: as in `Storage`; smaller leaves are stored in FP32 and have no groups.
    """
    _require_named_shardings(params)
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


def _require_named_shardings(params: optax.Params) -> None:
    """Raises unless every parameter is on a mesh."""
    for path, leaf in jax.tree.leaves_with_path(params):
        if not isinstance(getattr(leaf, "sharding", None), NamedSharding):
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} has no NamedSharding. Place the parameters "
                "on a mesh first, or pass jax.ShapeDtypeStruct(shape, dtype, sharding=...)."
            )


def full(param: Any, shape: tuple[int, ...], dtype: DTypeLike, value: int = 0) -> Array:
    """A leaf of the state with one value, placed where the parameter is if that can be seen.

    Under jit it is seen on explicit axes only.
    """
    sharding = None
    if isinstance(param, jax.core.Tracer):
        traced = jax.typeof(param).sharding
        if AxisType.Explicit in traced.mesh.axis_types:
            sharding = traced
    # A leaf placed for a parameter that JAX placed by itself would make jit compile twice.
    elif isinstance(param, jax.Array) and param.committed:
        sharding = param.sharding
    if isinstance(sharding, NamedSharding):
        sharding = _sharding_like(sharding, shape)
    leaf = jnp.full(shape, value, dtype, device=sharding)
    return mesh_axes.varying_like(leaf, param) if isinstance(param, jax.core.Tracer) else leaf


def _sharding_like(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """A parameter's sharding for a leaf of its state, without axes that it does not divide."""
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
    variables = _flax_types("flax.nnx", "Variable")
    boxes = variables + _flax_types("flax.core.meta", "Partitioned")
    mesh = jax.sharding.get_abstract_mesh()

    def fit(box: Any, param: Any) -> Any:
        if not isinstance(box, boxes) or len(jax.tree.leaves(box)) != 1:
            return box
        size, param_size = (tuple(jax.tree.leaves(tree)[0].shape) for tree in (box, param))
        same_rank = len(size) == len(param_size)
        equal = [same_rank and n == m for n, m in zip(size, param_size, strict=False)]
        if not isinstance(box, variables):
            return box.replace(names=_restricted(box.names, equal))
        metadata = box.get_metadata()
        fitted = {}
        for name in ANNOTATIONS:
            axes = metadata.get(name)
            if isinstance(axes, tuple | jax.sharding.PartitionSpec):
                keep = list(equal)
                for i, (axis, n) in enumerate(zip(axes, size, strict=False)):
                    known = all(name in mesh.shape for name in jax.tree.leaves(axis))
                    shards = mesh_axes.shards(axis, mesh) if known else jax.device_count()
                    keep[i] = keep[i] or n % shards == 0
                fitted[name] = _restricted(axes, keep)
        return box.copy(**fitted) if fitted else box

    return jax.tree.map(fit, tree, params, is_leaf=lambda node: isinstance(node, boxes))


def _flax_types(module: str, name: str) -> tuple[Any, ...]:
    """A tuple with a class of Flax; empty until the user imports Flax, which takes a second."""
    return (getattr(sys.modules[module], name),) if module in sys.modules else ()


def _restricted(axes: Any, keep: list[bool]) -> Any:
    """The names of axes, None where `keep` is false, in a container like theirs."""
    names = [axis if stays else None for axis, stays in zip(axes, keep, strict=False)]
    return tuple(names) if isinstance(axes, tuple) else type(axes)(*names)
