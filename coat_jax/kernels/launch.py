"""Runs Triton kernels on JAX arrays: through jax-triton, or in Triton's interpreter.

A kernel is written as a plain function under `@kernel`. Triton is imported when the
first one is launched, not when the module that holds it is: `import coat_jax` needs none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coat_jax.kernels import dispatch
from coat_jax.kernels.kernel_cache import triton_kernel

_ONE_AT_A_TIME = threading.Lock()  # the interpreter keeps its grid in global variables


class Kernel:
    """A function in Triton's language, compiled at its first launch."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self._jitted: Any = None

    def jitted(self) -> Any:
        """The function under `triton.jit`, and with it every kernel function it calls."""
        if self._jitted is None:
            import triton
            import triton.language

            self._jitted = triton.jit(self.function)
            # Triton looks names up in the function's module, where its own must stand by now.
            names = self.function.__globals__
            names["tl"] = triton.language
            for name, value in list(names.items()):
                if isinstance(value, Kernel):
                    names[name] = value.jitted()
        return self._jitted


def kernel(function: Callable[..., Any]) -> Any:
    """Marks a function as a Triton kernel, or as a part of one."""
    return Kernel(function)


def launch(
    entry: Any,
    *inputs: jax.Array,
    outputs: Sequence[jax.ShapeDtypeStruct],
    aliases: Mapping[int, int],
    programs: int,
    warps: int,
    **constants: Any,
) -> list[jax.Array]:
    """Runs `programs` instances of a kernel on pointers to the inputs, then the outputs.

    Args:
        entry: the kernel.
        inputs: arrays, in the order of the kernel's parameters.
        outputs: the shapes and dtypes of the results; their pointers follow the inputs'.
        aliases: input index -> output index, for what is updated in place.
        programs: the size of the one-dimensional grid.
        warps: warps per program.
        constants: the kernel's `tl.constexpr` parameters.
    """
    jitted = entry.jitted() if isinstance(entry, Kernel) else entry
    if dispatch.interpreting():
        return _interpret(jitted, inputs, outputs, aliases, programs, constants)
    return triton_kernel.bind(
        *inputs,
        kernel=jitted,
        outputs=tuple(outputs),
        aliases=tuple(aliases.items()),
        programs=programs,
        warps=warps,
        capability=dispatch.target_capability(),
        constants=tuple(constants.items()),
    )


def _interpret(
    jitted: Any,
    inputs: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    aliases: Mapping[int, int],
    programs: int,
    constants: Mapping[str, Any],
) -> list[jax.Array]:
    """Runs a kernel on one CPU device, the outputs in the inputs' memory where they are aliased."""
    of_output = {output: operand for operand, output in aliases.items()}

    def run(*arrays: np.ndarray) -> list[np.ndarray]:
        pointers = [_to_torch(a) for a in arrays]
        results = [
            pointers[of_output[i]] if i in of_output else _to_torch(np.empty(o.shape, o.dtype))
            for i, o in enumerate(outputs)
        ]
        with _ONE_AT_A_TIME:
            jitted[(programs,)](*pointers, *results, **constants)
        return [
            _to_numpy(r, o.dtype).reshape(o.shape) for r, o in zip(results, outputs, strict=True)
        ]

    return jax.pure_callback(run, list(outputs), *inputs)


def _to_torch(array: np.ndarray) -> Any:
    import torch

    array = np.array(array, order="C")  # a copy: the kernel may write into it
    names = {"bfloat16": "bfloat16", "float8_e4m3fn": "float8_e4m3fn", "float8_e5m2": "float8_e5m2"}
    name = names.get(array.dtype.name)
    if name is None:
        return torch.from_numpy(array)
    carrier = array.view(np.dtype(f"i{array.dtype.itemsize}"))
    return torch.from_numpy(carrier).view(getattr(torch, name))


def _to_numpy(tensor: Any, dtype: Any) -> np.ndarray:
    import torch

    carrier = {1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.view(carrier).numpy().view(jnp.dtype(dtype))
