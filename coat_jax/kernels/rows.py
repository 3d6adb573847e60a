"""Runs a kernel over arrays that are sharded along rows and columns, each device on its own shards.

XLA cannot look into a kernel: left alone it gathers the operands and replicates the results.
Here every axis has a name, and axes of one name are cut alike:

    "b s f"        an array of rows and columns
    "b s f/16"     one number per 16 columns, cut where the columns are cut, in whole blocks
    "f b s"        a transposed copy
    "!d"           an axis that no device may hold a part of: the kernel needs it whole

The first operand in which an axis stands decides how it is cut.
"""

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

from coat_jax.kernels.identity import call_by_name
from coat_jax.kernels.partition import divides_cleanly

Kernel = Callable[..., Sequence[Array]]


def over_rows(
    run: Kernel, arrays: Sequence[Array], operands: Sequence[str], results: Sequence[str]
) -> tuple[Array, ...]:
    """Calls `run` on the shards of `arrays` that each device holds.

    Args:
        run: (*arrays) -> results, on arrays of any size along the axes that may be cut.
        arrays: the operands.
        operands: the axes of each, as above.
        results: the axes of each result.
    """
    shapes = [a.shape for a in arrays]
    layout = _Layout(shapes, operands, results)

    @custom_partitioning
    def whole(*arrays: Array) -> tuple[Array, ...]:
        return tuple(run(*arrays))

    def partition(mesh: Any, operand_types: Sequence[Any], result_types: Sequence[Any]) -> Any:
        del result_types
        cuts = layout.cuts(mesh, [a.sharding for a in operand_types])
        shardings = [
            tuple(NamedSharding(mesh, layout.spec(axes, cuts)) for axes in group)
            for group in (operands, results)
        ]
        return mesh, lambda *shards: tuple(run(*shards)), shardings[1], shardings[0]

    def rule(mesh: Any, operand_types: Sequence[Any], result_types: Sequence[Any]) -> Any:
        del operand_types, result_types
        return layout.rule(mesh)

    whole.def_partition(partition, sharding_rule=rule)
    return tuple(call_by_name(whole, run, arrays))


class _Layout:
    """The axes of all arrays: their sizes, and the blocks that must stay together."""

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
        # An axis with a short last block cannot be cut in whole blocks.
        self.whole |= {name for name, size in self.sizes.items() if size % self.blocks[name]}

    def cuts(self, mesh: Any, shardings: Sequence[Any]) -> dict[str, Any]:
        """Which mesh axes each named axis is cut along."""
        cuts: dict[str, Any] = {}
        used: set[str] = set()
        for sharding, axes in zip(shardings, self.operands, strict=True):
            spec = sharding.spec if isinstance(sharding, NamedSharding) else ()
            for entry, axis in zip(spec, axes.split(), strict=False):
                name, _ = _parse(axis)
                names = entry if isinstance(entry, tuple) else (entry,) if entry else ()
                if name in cuts or name in self.whole or not names or used & set(names):
                    continue
                parts = math.prod(mesh.shape[n] for n in names)
                if self.sizes[name] % (parts * self.blocks[name]) == 0:
                    cuts[name] = entry
                    used |= set(names)
        return cuts

    def spec(self, axes: str, cuts: dict[str, Any]) -> PartitionSpec:
        return PartitionSpec(*(cuts.get(_parse(axis)[0]) for axis in axes.split()))

    def rule(self, mesh: Any) -> SdyShardingRule:
        """The axes as Shardy's factors: a blocked axis is (blocks, block)."""
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
            # All arrays of this axis split it at the same places.
            parts = [name]
            for smaller in sorted(self._splits(name), reverse=True):
                if smaller >= block and smaller < self.blocks[name]:
                    larger = min(b for b in (*self._splits(name), self.blocks[name]) if b > smaller)
                    part = f"{name}_{smaller}"
                    sizes[part] = larger // smaller
                    parts.append(part)
            return CompoundFactor(*parts)

        def mapping(axes: str) -> ArrayMapping:
            return ArrayMapping(*(factors(axis) for axis in axes.split()))

        operands, results = (
            tuple(mapping(axes) for axes in group) for group in (self.operands, self.results)
        )
        # Inner factors, and axes that must be whole, in the order in which they first appear.
        whole: dict[str, None] = {}
        for axes in (*self.operands, *self.results):
            for axis in axes.split():
                found = factors(axis)
                parts = tuple(found) if isinstance(found, CompoundFactor) else (found,)
                uncut = parts[1:] if _parse(axis)[0] not in whole_axes else parts
                whole |= dict.fromkeys(uncut)
        special: dict[str, Any] = {"need_replication_factors": tuple(whole), **sizes}
        return SdyShardingRule(operands, results, **special)

    def _splits(self, name: str) -> set[int]:
        """The block sizes in which an axis is counted anywhere, 1 for the axis itself."""
        found = (_parse(axis) for axes in (*self.operands, *self.results) for axis in axes.split())
        return {block for other, block in found if other == name}


def _parse(axis: str) -> tuple[str, int]:
    """The name of an axis, and over how many of its places one number stands."""
    name, _, block = axis.removeprefix("!").partition("/")
    return name, int(block or 1)


def as_rows(x: Array) -> Array:
    """`x` with exactly two row axes: [B, S, D]."""
    if x.ndim == 3:
        return x
    leading = (1,) * (3 - x.ndim) if x.ndim < 3 else (math.prod(x.shape[:-2]),)
    return x.reshape(*leading, *x.shape[-2:])
