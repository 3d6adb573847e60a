"""Runs an in-place kernel over the sharded leaves of an optimizer, each device on its own shards.

XLA cannot look into a kernel: left alone it gathers the operands and copies the results. The
sharding rule given here says that all arrays of a leaf are sharded alike along every axis, the last
one in whole groups, and that no shard depends on another. But a shard must know which of the whole
array's groups it holds (`LeafShard`), so that stochastic rounding does not depend on the mesh.

A last axis that the mesh divides inside a group is gathered first, as XLA would do for any
operation that needs the whole axis.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array

from coat_jax.kernels.cache_key import call_with_stable_key
from coat_jax.kernels.sharding import divides_cleanly
from coat_jax.numerics import mesh_axes
from coat_jax.numerics.qtensor import scales_shape

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
            the leaf's shape, and its sharding is the leaf's.
        group_size: elements per scale.
    """
    sizes = [len(arrays) for arrays in leaves]
    shapes = [arrays[0].shape for arrays in leaves]

    def unflatten(flat: Sequence[Any]) -> tuple[list[Any], list[list[Any]]]:
        rest = iter(flat)
        head = [next(rest) for _ in shared]
        return head, [[next(rest) for _ in range(size)] for size in sizes]

    def run(flat: Sequence[Array], shards: Sequence[LeafShard]) -> list[list[Array]]:
        return step(*unflatten(flat), shards)

    def unsharded(*flat: Array) -> list[list[Array]]:
        return run(flat, [LeafShard(shape, 0, ()) for shape in shapes])

    whole = custom_partitioning(unsharded)

    def partition(mesh: Any, operands: Sequence[Any], results: Sequence[Sequence[Any]]) -> Any:
        _, leaf_operands = unflatten(operands)
        specs = [
            _clean_spec(mesh, arrays[0].sharding, shape, group_size)
            for arrays, shape in zip(leaf_operands, shapes, strict=True)
        ]
        everywhere = NamedSharding(mesh, PartitionSpec())
        operand_shardings = [everywhere] * len(shared)
        operand_shardings += [
            NamedSharding(mesh, spec)
            for spec, size in zip(specs, sizes, strict=True)
            for _ in range(size)
        ]
        result_shardings = [
            [NamedSharding(mesh, spec)] * len(arrays)
            for spec, arrays in zip(specs, results, strict=True)
        ]

        def on_shards(*flat: Array) -> list[list[Array]]:
            # Nothing is sharded in here. On an explicit mesh JAX would annotate what is computed,
            # which XLA cannot compile after it has partitioned the program.
            with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
                shards = [
                    _shard(mesh, spec, shape, group_size)
                    for spec, shape in zip(specs, shapes, strict=True)
                ]
                return run(flat, shards)

        return mesh, on_shards, result_shardings, tuple(operand_shardings)

    def rule(mesh: Any, operand_types: Sequence[Any], result_types: Sequence[Any]) -> Any:
        del operand_types, result_types
        return _sharding_rule(mesh, shared, leaves, result_shapes, group_size)

    flat = [*shared, *(a for arrays in leaves for a in arrays)]
    result_shapes = [[r.shape for r in leaf] for leaf in jax.eval_shape(unsharded, *flat)]
    whole.def_partition(partition, sharding_rule=rule)
    results: list[list[Array]] = _typed(
        lambda *flat: call_with_stable_key(whole, unsharded, flat), leaves, result_shapes
    )(*flat)
    return results


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


def _sharding_rule(
    mesh: Any,
    shared: Sequence[Array],
    leaves: Sequence[Sequence[Array]],
    result_shapes: Sequence[Sequence[Shape]],
    group_size: int,
) -> SdyShardingRule:
    """One factor per axis of each leaf, none in common; a last axis is (groups, elements)."""
    replicated: list[str] = []
    sizes: dict[str, int] = {}

    def shardable(leaf: int) -> bool:
        """Whether the last axis may be sharded, in whole groups."""
        columns = leaves[leaf][0].shape[-1]
        return columns % group_size == 0 and divides_cleanly(mesh, columns // group_size)

    def mapping(leaf: int, shape: Shape) -> ArrayMapping:
        whole = leaves[leaf][0].shape
        if not shape:
            return ArrayMapping()
        axes: list[Any] = [f"leaf{leaf}axis{i}" for i in range(len(shape) - 1)]
        group, element, columns = (f"leaf{leaf}{part}" for part in ("group", "element", "columns"))
        if shape != whole:
            return ArrayMapping(*axes, group)
        if not shardable(leaf):
            return ArrayMapping(*axes, columns)
        sizes[element] = group_size
        return ArrayMapping(*axes, CompoundFactor(group, element))

    operands = []
    for i, array in enumerate(shared):
        factors = [f"shared{i}axis{axis}" for axis in range(array.ndim)]
        replicated += factors
        operands.append(ArrayMapping(*factors))
    operands += [mapping(i, a.shape) for i, arrays in enumerate(leaves) for a in arrays]
    results = [mapping(i, shape) for i, shapes in enumerate(result_shapes) for shape in shapes]
    for i, arrays in enumerate(leaves):
        if arrays[0].ndim and not shardable(i):
            replicated += [f"leaf{i}columns", f"leaf{i}group"]
    special: dict[str, Any] = {"need_replication_factors": tuple(replicated), **sizes}
    return SdyShardingRule(tuple(operands), tuple(results), **special)


def _clean_spec(mesh: Any, sharding: Any, shape: Shape, group_size: int) -> PartitionSpec:
    """The sharding of a leaf, without the axes that its mesh does not divide evenly."""
    if not isinstance(sharding, NamedSharding):
        raise ValueError(
            "The optimizer's kernel needs to know the mesh. Call the step under jax.set_mesh(mesh)."
        )
    spec = (*sharding.spec, *(None,) * (len(shape) - len(sharding.spec)))
    sizes = scales_shape(shape, group_size)
    whole_groups = not shape or shape[-1] % group_size == 0

    def fits(axis: int) -> bool:
        parts = mesh_axes.shards(spec[axis], mesh)
        return sizes[axis] % parts == 0 and (axis < len(shape) - 1 or whole_groups)

    return PartitionSpec(*(spec[axis] if fits(axis) else None for axis in range(len(shape))))


def _shard(mesh: Any, spec: PartitionSpec, shape: Shape, group_size: int) -> LeafShard:
    """This device's shard; called inside the partitioned program."""
    whole = scales_shape(shape, group_size)
    parts = [mesh_axes.shards(entry, mesh) for entry in spec]
    local = tuple(size // n for size, n in zip(whole, parts, strict=True))
    start: Any = 0
    for axis, entry in enumerate(spec):
        if parts[axis] > 1:
            index = jax.lax.axis_index(mesh_axes.names(entry))
            start = start + index * jnp.int32(local[axis] * math.prod(whole[axis + 1 :]))
    jumps = tuple(
        (math.prod(local[axis:]), (whole[axis] - local[axis]) * math.prod(whole[axis + 1 :]))
        for axis in range(1, len(whole))
        if local[axis] != whole[axis]
    )
    local_shape = tuple(size // n for size, n in zip(shape, parts, strict=True))
    return LeafShard(local_shape, start, jumps)
