"""Runs Triton kernels on JAX arrays.

The kernels are the `@triton.jit` functions of `coat_jax.kernels.triton`. The functions that launch
them import them in their body, so that `import coat_jax` needs no Triton.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from coat_jax.kernels import dispatch
from coat_jax.kernels.kernel_cache import triton_kernel


class Tile(NamedTuple):
    """The part of an array that one program works on."""

    height: int
    width: int
    warps: int  # of the program


class Schedule(NamedTuple):
    """How the programs of a kernel with a loop over products are divided and run."""

    rows: int  # of a program's block
    columns: int  # of what one step of the loop reads
    warps: int
    stages: int  # of the loop that are under way at a time


class Tiles(NamedTuple):
    """An array in tiles, as constants of kernels."""

    rows: int
    columns: int
    height: int  # of a tile
    width: int
    block: int  # neighbours in a row that share a number


def launch(
    kernel: Any,
    *inputs: jax.Array,
    outputs: Sequence[jax.ShapeDtypeStruct],
    programs: int,
    warps: int,
    stages: int = 1,
    aliases: Mapping[int, int] | None = None,
    **constants: Any,
) -> list[jax.Array]:
    """Runs `programs` instances of a kernel, which gets pointers to the inputs, then the outputs.

    Args:
        kernel: a `@triton.jit` function.
        inputs: arrays, in the order of the kernel's parameters.
        outputs: the shapes and dtypes of the results.
        programs: the size of the one-dimensional grid.
        warps: warps per program.
        stages: how many steps of a loop are under way at a time.
        aliases: input index -> output index, for arrays that are updated in place.
        constants: the kernel's `tl.constexpr` parameters.
    """
    aliases = aliases or {}
    if programs == 0:  # arrays without elements: GPUs cannot launch an empty grid
        aliased_input = {output: operand for operand, output in aliases.items()}
        return [
            inputs[aliased_input[i]] if i in aliased_input else jnp.zeros(o.shape, o.dtype)
            for i, o in enumerate(outputs)
        ]
    return triton_kernel.bind(
        *inputs,
        kernel=kernel,
        outputs=tuple(outputs),
        aliases=tuple(aliases.items()),
        programs=programs,
        warps=warps,
        stages=stages,
        capability=dispatch.target_capability(),
        constants=tuple(constants.items()),
    )


def divide(array: Any, *others: Any, tile: Tile, block: int = 1) -> dict[str, Any]:
    """Returns the arguments of `launch` that divide its first input [*rows, columns] into tiles."""
    del others
    *leading, columns = array.shape
    rows, width = math.prod(leading), max(tile.width, block)
    programs = -(-rows // tile.height) * -(-columns // width)
    tiles = Tiles(rows, columns, tile.height, width, block)
    return {"programs": programs, "warps": tile.warps, "TILES": tiles}
