"""Runs a kernel over sharded arrays, each device on its own shards.

XLA cannot look into a kernel: left alone it gathers the operands and replicates the results.
`run_sharded` gives the call a sharding rule. Every axis has a name, and axes of the same name are
sharded alike:

    "b s f"        the rows and columns of an array
    "b s f/16"     one number per block of 16 columns; sharding the columns keeps blocks whole
    "f b s"        a transposed copy
    "!d"           an axis that every device needs whole

The first operand that has an axis decides how it is sharded.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from coat_jax.kernels.cache_key import call_with_stable_key
from coat_jax.numerics import mesh_axes

Kernel = Callable[..., Sequence[Array]]


def run_sharded(
    run: Kernel, arrays: Sequence[Array], operands: Sequence[str], results: Sequence[str]
) -> tuple[Array, ...]:
    """Calls `run` on the shards of `arrays` that each device holds.

    Args:
        run: (*arrays) -> results, for arrays of any size along the axes that may be sharded.
        arrays: the operands.
        operands: the named axes of each operand, as above.
        results: the named axes of each result.
    """
    shapes = [a.shape for a in arrays]
    axes = _NamedAxes(shapes, operands, results)

    @custom_partitioning
    def whole(*arrays: Array) -> tuple[Array, ...]:
        return tuple(run(*arrays))

    def partition(mesh: Any, operand_types: Sequence[Any], result_types: Sequence[Any]) -> Any:
        del result_types
        sharded = axes.sharded(mesh, [a.sharding for a in operand_types])
        shardings = [
            tuple(NamedSharding(mesh, axes.spec(array, sharded)) for array in group)
            for group in (operands, results)
        ]
        return mesh, lambda *shards: tuple(run(*shards)), shardings[1], shardings[0]

    def rule(mesh: Any, operand_types: Sequence[Any], result_types: Sequence[Any]) -> Any:
        del operand_types, result_types
        return axes.rule(mesh)

    whole.def_partition(partition, sharding_rule=rule)
    return tuple(call_with_stable_key(whole, run, arrays))


class _NamedAxes:
    """The named axes of all operands and results.

    Attributes:
        sizes: of each axis.
        blocks: how many neighbours along each axis must stay on one device.
        whole: the axes that cannot be sharded.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], operands: Sequence[str], results: Sequence[str]
    ):
        self.operands, self.results = operands, results
        self.sizes: dict[str, int] = {}
        self.blocks: dict[str, int] = {}
        self.whole: set[str] = set()
        for axes in (*operands, *results):
            for axis in axes.split():
                name, block = _parse(axis)
                self.blocks[name] = math.lcm(self.blocks.get(name, 1), block)
                if axis.startswith("!"):
                    self.whole.add(name)
        for shape, axes in zip(shapes, operands, strict=True):
            for size, axis in zip(shape, axes.split(), strict=True):
                name, block = _parse(axis)
                if block == 1:
                    self.sizes[name] = size
        # An axis whose last block is short cannot be divided into whole blocks.
        self.whole |= {name for name, size in self.sizes.items() if size % self.blocks[name]}

    def sharded(self, mesh: Any, shardings: Sequence[Any]) -> dict[str, Any]:
        """The PartitionSpec entry of every sharded axis, from the shardings of the operands."""
        sharded: dict[str, Any] = {}
        used: set[str] = set()
        for sharding, axes in zip(shardings, self.operands, strict=True):
            spec = sharding.spec if isinstance(sharding, NamedSharding) else ()
            for entry, axis in zip(spec, axes.split(), strict=False):
                name, _ = _parse(axis)
                names = mesh_axes.names(entry)
                if name in sharded or name in self.whole or not names or used & set(names):
                    continue
                parts = mesh_axes.shards(entry, mesh)
                if self.sizes[name] % (parts * self.blocks[name]) == 0:
                    sharded[name] = entry
                    used |= set(names)
        return sharded

    def spec(self, axes: str, sharded: dict[str, Any]) -> PartitionSpec:
        """The PartitionSpec of an array with these axes."""
        return PartitionSpec(*(sharded.get(_parse(axis)[0]) for axis in axes.split()))

    def rule(self, mesh: Any) -> SdyShardingRule:
        """The axes as factors of a Shardy rule: an axis with blocks is (blocks, block)."""
        sizes: dict[str, int] = {}
        whole_axes = self.whole | {
            name
            for name, block in self.blocks.items()
            if block > 1 and not divides_cleanly(mesh, self.sizes[name] // block)
        }

        def factors(axis: str) -> Any:
            name, block = _parse(axis)
            if name in whole_axes:
                return name if block == 1 else f"{name}_per_{block}"
            inner = self.blocks[name] // block
            if inner == 1:
                return name
            # Every array with this axis must split it into the same factors.
            parts = [name]
            for smaller in sorted(self._block_sizes(name), reverse=True):
                if smaller >= block and smaller < self.blocks[name]:
                    sizes_above = (*self._block_sizes(name), self.blocks[name])
                    larger = min(b for b in sizes_above if b > smaller)
                    part = f"{name}_{smaller}"
                    sizes[part] = larger // smaller
                    parts.append(part)
            return CompoundFactor(*parts)

        def mapping(axes: str) -> ArrayMapping:
            return ArrayMapping(*(factors(axis) for axis in axes.split()))

        operands, results = (
            tuple(mapping(axes) for axes in group) for group in (self.operands, self.results)
        )
        # Not sharded: the inner factors, and whole axes. Shardy wants them in order of appearance.
        replicated: dict[str, None] = {}
        for axes in (*self.operands, *self.results):
            for axis in axes.split():
                found = factors(axis)
                parts = tuple(found) if isinstance(found, CompoundFactor) else (found,)
                inner = parts[1:] if _parse(axis)[0] not in whole_axes else parts
                replicated |= dict.fromkeys(inner)
        special: dict[str, Any] = {"need_replication_factors": tuple(replicated), **sizes}
        return SdyShardingRule(operands, results, **special)

    def _block_sizes(self, name: str) -> set[int]:
        """The block sizes with which an axis occurs, 1 for the axis itself."""
        found = (_parse(axis) for axes in (*self.operands, *self.results) for axis in axes.split())
        return {block for other, block in found if other == name}


def _parse(axis: str) -> tuple[str, int]:
    """The name of an axis, and the size of its blocks."""
    name, _, block = axis.removeprefix("!").partition("/")
    return name, int(block or 1)


def divides_cleanly(mesh: Any, groups: int) -> bool:
    """Whether every way in which Shardy may shard that many groups uses whole mesh axes.

    Shardy may also shard by a part of a mesh axis, which a PartitionSpec cannot express. And its
    rules have no factor of size 1, hence none for a single group.
    """
    if groups == 1:
        return False
    sizes = list(mesh.shape.values())
    for used in itertools.product((False, True), repeat=len(sizes)):
        rest, left = divmod(groups, math.prod(itertools.compress(sizes, used)))
        unused = [size for size, taken in zip(sizes, used, strict=True) if not taken]
        if left == 0 and any(math.gcd(rest, size) not in (1, size) for size in unused):
            return False
    return True


def as_3d(x: Array) -> Array:
    """`x` as [B, S, D]: leading axes are merged, or added with size 1."""
    if x.ndim == 3:
        return x
    leading = (1,) * (3 - x.ndim) if x.ndim < 3 else (math.prod(x.shape[:-2]),)
    return x.reshape(*leading, *x.shape[-2:])
