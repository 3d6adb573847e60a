"""Meshes, and the entries of a PartitionSpec: None, the name of a mesh axis, or several names."""

import math
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType
from jaxtyping import Array


def shards(entry: Any, mesh: Any) -> int:
    """How many shards an array axis has on a mesh, concrete or abstract."""
    return math.prod(mesh.shape[name] for name in jax.tree.leaves(entry))


def varying_axes(*arrays: Array) -> tuple[str, ...]:
    """The axes of the surrounding `shard_map`s along which any of the arrays may differ."""
    return tuple(sorted({axis for a in arrays for axis in jax.typeof(a).mat.varying}))


def varying_like(array: Array, other: Array) -> Array:
    """`array`, marked as varying over the axes of `shard_map` over which `other` varies."""
    axes = tuple(axis for axis in varying_axes(other) if axis not in varying_axes(array))
    return jax.lax.pcast(array, axes, to="varying") if axes else array


def automatic_mesh() -> AbstractMesh | None:
    """The mesh over which XLA shards what is being traced; None with fewer than two devices.

    Also None inside `jax.shard_map`, and over explicit axes, except inside an op.
    """
    mesh = jax.sharding.get_abstract_mesh()
    automatic = all(axis == AxisType.Auto for axis in mesh.axis_types)
    return mesh if automatic and not mesh.empty and mesh.size > 1 else None
