"""Runs an in-place kernel over the sharded leaves of an optimizer, each device on its own shards.

All arrays of a leaf are sharded alike along every axis, the last one in whole groups, and no shard
depends on another. But a shard must know which of the whole array's groups it holds (`LeafShard`),
so that stochastic rounding does not depend on the mesh.

A last axis that the mesh divides inside a group is gathered first, as XLA would do for any
operation that needs the whole axis.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jaxtyping import Array

from coat_jax.kernels.sharding import UNSHARDED, Placement, run_placed
from coat_jax.numerics import mesh_axes
from coat_jax.numerics.groups import scales_shape

Shape = tuple[int, ...]


class LeafShard(NamedTuple):
    """One device's shard of a leaf, and which of the leaf's groups it holds.

    Groups are numbered in row-major order. Group i of the shard is group
    start + i + sum(i // inner * jump)  of the leaf.
    """

    shape: Shape  # of the shard
    start: Any  # int, or a scalar computed from the device's place in the mesh
    jumps: tuple[tuple[int, int], ...]  # (inner, jump) for every sharded axis but the first


LeavesStep = Callable[
    [Sequence[Array], Sequence[Sequence[Array]], Sequence[LeafShard]], list[list[Array]]
]


def run_sharded_leaves(
    step: LeavesStep,
    shared: Sequence[Array],
    leaves: Sequence[Sequence[Array]],
    *,
    group_size: int,
) -> list[list[Array]]:
    """Calls `step` on the shards of `leaves` that each device holds.

    Args:
        step: (shared, leaves, shards) -> results per leaf. Each result has the shape of its
            leaf or of the leaf's scales.
        shared: arrays that every device needs whole.
        leaves: per leaf, arrays of the leaf's shape and of its scales' shape. The first one has
            the leaf's shape.
        group_size: elements per scale.
    """
    shapes = [arrays[0].shape for arrays in leaves]

    def run(placement: Placement, *flat: Array) -> list[list[Array]]:
        local = _split(flat[len(shared) :], leaves)
        shards = [_shard(placement, i, shape, group_size) for i, shape in enumerate(shapes)]
        return step(flat[: len(shared)], local, shards)

    def axes(leaf: int, shape: Shape) -> str:
        """The named axes of an array of a leaf; no two leaves have one in common."""
        names = _names(leaf, shape)
        if shape != shapes[leaf]:
            names[-1] += f"/{group_size}"
        return " ".join(names)

    flat = [*shared, *(a for arrays in leaves for a in arrays)]
    shapes_of_results = [
        [r.shape for r in results]
        for results in jax.eval_shape(lambda *flat: run(UNSHARDED, *flat), *flat)
    ]
    operands = [" ".join(f"!shared{i}axis{k}" for k in range(a.ndim)) for i, a in enumerate(shared)]
    operands += [axes(i, a.shape) for i, arrays in enumerate(leaves) for a in arrays]
    results = [axes(i, shape) for i, found in enumerate(shapes_of_results) for shape in found]

    def call(*flat: Array) -> list[list[Array]]:
        found = run_placed(
            lambda *args: [r for leaf in run(*args) for r in leaf], flat, operands, results
        )
        return _split(found, shapes_of_results)

    stepped: list[list[Array]] = _typed(call, leaves, shapes_of_results)(*flat)
    return stepped


def _split(flat: Sequence[Array], like: Sequence[Sequence[Any]]) -> list[list[Array]]:
    rest = iter(flat)
    return [list(itertools.islice(rest, len(part))) for part in like]


def _typed(
    call: Callable, leaves: Sequence[Sequence[Array]], result_shapes: Sequence[Sequence[Shape]]
) -> Callable:
    """`call`; on an explicit mesh, the types of its results have the shardings of the leaves."""
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit not in mesh.axis_types:
        return call
    like = [{a.shape: jax.typeof(a).sharding for a in reversed(arrays)} for arrays in leaves]
    shardings = [
        [known[shape] for shape in shapes]
        for known, shapes in zip(like, result_shapes, strict=True)
    ]
    return jax.sharding.auto_axes(call, out_sharding=shardings)


def _names(leaf: int, shape: Shape) -> list[str]:
    return [f"leaf{leaf}axis{k}" for k in range(len(shape))]


def _shard(placement: Placement, leaf: int, shape: Shape, group_size: int) -> LeafShard:
    """This device's shard; called inside the partitioned program."""
    entries = [placement.entries.get(name) for name in _names(leaf, shape)]
    parts = [mesh_axes.shards(entry, placement.mesh) for entry in entries]
    whole = scales_shape(shape, group_size)
    local = tuple(size // n for size, n in zip(whole, parts, strict=True))
    start: Any = 0
    for axis, entry in enumerate(entries):
        if parts[axis] > 1:
            index = jax.lax.axis_index(tuple(jax.tree.leaves(entry)))
            start = start + index * jnp.int32(local[axis] * math.prod(whole[axis + 1 :]))
    jumps = tuple(
        (math.prod(local[axis:]), (whole[axis] - local[axis]) * math.prod(whole[axis + 1 :]))
        for axis in range(1, len(whole))
        if local[axis] != whole[axis]
    )
    local_shape = tuple(size // n for size, n in zip(shape, parts, strict=True))
    return LeafShard(local_shape, start, jumps)
