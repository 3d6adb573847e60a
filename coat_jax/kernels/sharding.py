"""Runs a kernel over sharded arrays, each device on its own shards.

XLA cannot look into a kernel: left alone it gathers the operands and replicates the results.
`run_placed` gives the call a sharding rule. Every axis has a name, and axes of the same name are
sharded alike:

    "b s f"        the rows and columns of an array
    "b s f/16"     one number per block of 16 columns; sharding the columns keeps blocks whole
    "f b s"        a transposed copy
    "!d"           an axis that every device needs whole

The first operand that has an axis decides how it is sharded.

Until XLA partitions a program, the call holds the address of a Python function, which differs in
every process, so JAX's cache of compiled programs would never find the program again. The trainer
therefore tells JAX to leave the address out of the key
(`jax_remove_custom_partitioning_ptr_from_cache_key`). Two programs that differ only in a kernel
would then share a key, so the call is in a function whose name contains the kernel's hash.

Under `vmap` a kernel runs for one element of the batch after the other.
"""

import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array

from coat_jax.kernels.launch import launch
from coat_jax.numerics import mesh_axes


class Placement(NamedTuple):
    """How the named axes of arrays are sharded over a mesh."""

    mesh: Any
    entries: dict[str, Any]  # of PartitionSpecs, for the axes that are sharded


UNSHARDED = Placement(None, {})


def on_one_device() -> bool:
    """Whether no array is sharded, because no mesh of several devices is set."""
    return jax.sharding.get_abstract_mesh().size <= 1


def launch_sharded(
    kernel: Any,
    inputs: Sequence[tuple[Array | None, str]],
    outputs: Sequence[tuple[str, DTypeLike]],
    grid: Callable[..., dict[str, Any]],
    sizes: Mapping[str, int] | None = None,
    **constants: Any,
) -> tuple[Array, ...]:
    """Launches a kernel, on each device for its own shards.

    Args:
        kernel: a `@triton.jit` function.
        inputs: arrays and their named axes; None for an array that the kernel does not read.
        outputs: the named axes and the dtype of each result.
        grid: of the shards, the arguments of `launch` that depend on their shapes.
        sizes: of axes that no input has; 1 without.
        constants: the kernel's other `tl.constexpr` parameters.
    """
    arrays = [array for array, _ in inputs if array is not None]
    operands = [axes for array, axes in inputs if array is not None]

    def run(_: Placement, *shards: Array) -> Sequence[Array]:
        found = {**(sizes or {}), **_NamedAxes([s.shape for s in shards], operands, []).sizes}

        def size(axis: str) -> int:
            name, block = _parse(axis)
            return -(-found.get(name, 1) // block)

        rest = iter(shards)
        # A pointer that is not read is that of the first input.
        pointers = [shards[0] if array is None else next(rest) for array, _ in inputs]
        results = [
            jax.ShapeDtypeStruct(tuple(map(size, axes.split())), dtype) for axes, dtype in outputs
        ]
        return launch(kernel, *pointers, outputs=results, **grid(*pointers), **constants)

    return run_placed(run, arrays, operands, [axes for axes, _ in outputs])


def run_placed(
    run: Callable[..., Sequence[Array]],
    arrays: Sequence[Array],
    operands: Sequence[str],
    results: Sequence[str],
) -> tuple[Array, ...]:
    """Calls `run` on the shards of `arrays` that each device holds.

    Args:
        run: (placement, *arrays) -> results, for arrays of any size along the axes that may be
            sharded. From the placement it can compute which shards it has.
        arrays: the operands.
        operands: the named axes of each operand, as above.
        results: the named axes of each result.
    """
    axes = _NamedAxes([a.shape for a in arrays], operands, results)

    def whole(*arrays: Array) -> tuple[Array, ...]:
        return tuple(run(UNSHARDED, *arrays))

    def partition(mesh: Any, operand_types: Sequence[Any], result_types: Sequence[Any]) -> Any:
        del result_types
        placement = Placement(mesh, axes.sharded(mesh, [a.sharding for a in operand_types]))
        shardings = [
            tuple(NamedSharding(mesh, axes.spec(array, placement.entries)) for array in group)
            for group in (operands, results)
        ]

        def on_shards(*shards: Array) -> tuple[Array, ...]:
            # Nothing is sharded in here. On an explicit mesh JAX would annotate what is computed,
            # which XLA cannot compile after it has partitioned the program.
            with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
                return tuple(run(placement, *shards))

        return mesh, on_shards, shardings[1], shardings[0]

    def rule(mesh: Any, operand_types: Sequence[Any], result_types: Sequence[Any]) -> Any:
        del operand_types, result_types
        return axes.rule(mesh)

    partitioned = custom_partitioning(whole)
    partitioned.def_partition(partition, sharding_rule=rule)

    def kernel(*arrays: Array) -> tuple[Array, ...]:
        found: tuple[Array, ...] = partitioned(*arrays)
        return found

    program = str(jax.make_jaxpr(whole)(*arrays)) + _sources()
    kernel.__name__ = f"kernel_{hashlib.sha256(program.encode()).hexdigest()[:16]}"
    batchable = custom_vmap(jax.jit(kernel))

    @batchable.def_vmap
    def one_after_the_other(
        size: int, batched: Sequence[bool], *arrays: Array
    ) -> tuple[tuple[Array, ...], tuple[bool, ...]]:
        def element(i: Array) -> tuple[Array, ...]:
            own = (a[i] if has_batch else a for a, has_batch in zip(arrays, batched, strict=True))
            found: tuple[Array, ...] = batchable(*own)
            return found

        return lax.map(element, jnp.arange(size)), (True,) * len(results)

    found: tuple[Array, ...] = batchable(*arrays)
    return found


@functools.cache
def _sources() -> str:
    """A hash of the kernels' source files: a jaxpr holds only their names."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class _NamedAxes:
    """The named axes of all operands and results.

    Attributes:
        sizes: of each axis.
        blocks: how many neighbours along each axis must stay on one device.
        whole: the axes that cannot be sharded.
        beside: the axes of all arrays that have an axis.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], operands: Sequence[str], results: Sequence[str]
    ):
        self.operands, self.results = operands, results
        self.sizes: dict[str, int] = {}
        self.blocks: dict[str, int] = {}
        self.whole: set[str] = set()
        self.beside: dict[str, set[str]] = {}
        for axes in (*operands, *results):
            for axis in axes.split():
                name, block = _parse(axis)
                self.blocks[name] = math.lcm(self.blocks.get(name, 1), block)
                self.beside.setdefault(name, set()).update(_parse(a)[0] for a in axes.split())
                if axis.startswith("!"):
                    self.whole.add(name)
        for shape, axes in zip(shapes, operands, strict=True):
            for size, axis in zip(shape, axes.split(), strict=True):
                name, block = _parse(axis)
                if block == 1:
                    self.sizes[name] = size
                else:  # unless another array says it
                    self.sizes.setdefault(name, size * block)
        # An axis whose last block is short cannot be divided into whole blocks.
        self.whole |= {name for name, size in self.sizes.items() if size % self.blocks[name]}

    def sharded(self, mesh: Any, shardings: Sequence[Any]) -> dict[str, Any]:
        """The PartitionSpec entry of every sharded axis, from the shardings of the operands."""
        sharded: dict[str, Any] = {}
        for sharding, axes in zip(shardings, self.operands, strict=True):
            spec = sharding.spec if isinstance(sharding, NamedSharding) else ()
            for entry, axis in zip(spec, axes.split(), strict=False):
                name, _ = _parse(axis)
                names = jax.tree.leaves(entry)
                if name in sharded or name in self.whole or not names:
                    continue
                used = {
                    n for other in self.beside[name] for n in jax.tree.leaves(sharded.get(other))
                }
                parts = mesh_axes.shards(entry, mesh)
                if not used & set(names) and self.sizes[name] % (parts * self.blocks[name]) == 0:
                    sharded[name] = entry
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
