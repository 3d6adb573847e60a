"""Runs Triton kernels on JAX arrays: through jax-triton, or in Triton's interpreter.

The kernels are the `@triton.jit` functions of `coat_jax.kernels.triton`. The functions that launch
them import them in their body, so that `import coat_jax` needs no Triton.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coat_jax.kernels import dispatch
from coat_jax.kernels.kernel_cache import triton_kernel

_ONE_AT_A_TIME = threading.Lock()  # Triton's interpreter keeps its grid in global variables


def launch(
    kernel: Any,
    *inputs: jax.Array,
    outputs: Sequence[jax.ShapeDtypeStruct],
    programs: int,
    warps: int,
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
    if dispatch.interpreting():
        return _interpret(kernel, inputs, outputs, aliases, programs, constants)
    return triton_kernel.bind(
        *inputs,
        kernel=kernel,
        outputs=tuple(outputs),
        aliases=tuple(aliases.items()),
        programs=programs,
        warps=warps,
        capability=dispatch.target_capability(),
        constants=tuple(constants.items()),
    )


def tile_count(rows: int, columns: int, tile_rows: int, tile_columns: int) -> int:
    """How many tiles cover an array [rows, columns]."""
    return -(-rows // tile_rows) * -(-columns // tile_columns)


def _interpret(
    kernel: Any,
    inputs: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    aliases: Mapping[int, int],
    programs: int,
    constants: Mapping[str, Any],
) -> list[jax.Array]:
    """Runs a kernel in Triton's interpreter on one CPU device."""
    aliased_input = {output: operand for operand, output in aliases.items()}

    def run(*arrays: np.ndarray) -> list[np.ndarray]:
        pointers = [_to_torch(a) for a in arrays]
        results = [
            pointers[aliased_input[i]]
            if i in aliased_input
            else _to_torch(np.empty(o.shape, o.dtype))
            for i, o in enumerate(outputs)
        ]
        with _ONE_AT_A_TIME:
            kernel[(programs,)](*pointers, *results, **constants)
        return [
            _to_numpy(r, o.dtype).reshape(o.shape) for r, o in zip(results, outputs, strict=True)
        ]

    return jax.pure_callback(run, list(outputs), *inputs)


def _to_torch(array: np.ndarray) -> Any:
    """A copy as a torch tensor, which has FP8 and BF16 of its own."""
    import torch

    array = np.array(array, order="C")  # copies: the kernel may write into it
    name = array.dtype.name
    if name not in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        return torch.from_numpy(array)
    integers = array.view(np.dtype(f"i{array.dtype.itemsize}"))
    return torch.from_numpy(integers).view(getattr(torch, name))


def _to_numpy(tensor: Any, dtype: Any) -> np.ndarray:
    """The memory of a torch tensor as a numpy array."""
    import torch

    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.view(integers).numpy().view(jnp.dtype(dtype))
