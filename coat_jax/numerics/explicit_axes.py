"""Ops on arrays that are sharded over explicit axes of a mesh.

`jax.make_mesh` makes axes of type `Explicit` by default. The type of an array then says how it is
sharded, and JAX asks how to shard the result of each product. Inside an op the caller cannot say
it, so XLA shards what is inside, as over axes of type `Auto`. The result of an op is sharded like
what it comes from, and a gradient like its parameter:

    x [rows over data, columns]    weight [rows over fsdp, columns over model]
    y [rows over data, columns over model]
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array

from coat_jax.numerics import mesh_axes

Entry = Any  # of a PartitionSpec: the mesh axes that an array axis is sharded over


def shard_inside(op: Callable[..., Any], result: Callable[[], Any], *arrays: Any) -> Any:
    """`op(*arrays)`; over explicit axes, XLA shards what it computes.

    Args:
        op: a function of arrays.
        result: gives the PartitionSpecs of what `op` returns; called only if they matter.
        arrays: trees of arrays and None.
    """
    mesh = next(
        (
            jax.typeof(leaf).sharding.mesh
            for leaf in jax.tree.leaves(arrays)
            if any(explicit_spec(leaf))
        ),
        None,
    )
    if mesh is None:
        return op(*arrays)
    explicit = [
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Explicit
    ]
    with jax.sharding.use_abstract_mesh(mesh):  # which need not be set
        return jax.sharding.auto_axes(op, axes=tuple(explicit), out_sharding=result())(*arrays)


def explicit_spec(array: Array) -> tuple[Entry, ...]:
    """The mesh axes that each axis of an array is explicitly sharded over; None without any."""
    kind = jax.typeof(array)
    found = tuple(getattr(kind.sharding, "spec", ()))
    return found + (None,) * (kind.ndim - len(found))


def merge_specs(*entries: Entry) -> PartitionSpec:
    """A PartitionSpec of entries from several arrays: a mesh axis counts where it comes first."""
    used: set[str] = set()
    kept = []
    for entry in entries:
        names = tuple(name for name in jax.tree.leaves(entry) if name not in used)
        used.update(names)
        kept.append(names or None)
    return PartitionSpec(*kept)


def of_heads(entry: Entry, heads: int) -> Entry:
    """How heads are sharded whose columns, side by side, are sharded like this."""
    mesh = jax.sharding.get_abstract_mesh()
    return entry if heads % mesh_axes.shards(entry, mesh) == 0 else None
