"""Runs kernels in Triton's interpreter; skips a module of tests where that is not there.

Triton decides at import whether it interprets. Then kernels have a lowering for CPUs.
"""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adam_cases import INTERPRETING
from jax.interpreters import mlir

from coat_jax.kernels.kernel_cache import triton_kernel

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

MARKS = [
    pytest.mark.interpret,
    pytest.mark.skipif(not INTERPRETING, reason="run with TRITON_INTERPRET=1"),
    # Logarithms of zero and exponentials of large numbers are meant.
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning"),
]
ONE_AT_A_TIME = threading.Lock()  # Triton's interpreter keeps its grid in global variables
OWN = {jnp.dtype(getattr(jnp, name)): name for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")}


def interpret(*inputs, kernel, outputs, aliases, programs, constants, **how):
    aliased = {output: operand for operand, output in aliases}

    def run(*arrays):
        pointers = [to_torch(a) for a in arrays]
        results = [
            pointers[aliased[i]] if i in aliased else to_torch(np.empty(o.shape, o.dtype))
            for i, o in enumerate(outputs)
        ]
        with ONE_AT_A_TIME:
            kernel[(programs,)](*pointers, *results, **dict(constants))
        return [
            to_numpy(r, o.dtype).reshape(o.shape) for r, o in zip(results, outputs, strict=True)
        ]

    return jax.pure_callback(run, list(outputs), *inputs)


def to_torch(array):
    """A copy, into which the kernel may write; torch has FP8 and BF16 of its own."""
    array = np.array(array, order="C")
    if array.dtype not in OWN:
        return torch.from_numpy(array)
    integers = array.view(np.dtype(f"i{array.dtype.itemsize}"))
    return torch.from_numpy(integers).view(getattr(torch, OWN[array.dtype]))


def to_numpy(tensor, dtype):
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.view(integers).numpy().view(jnp.dtype(dtype))


def whole_numbers(tensor, scope):
    """Makes tensors bounds of loops: Triton's way ended with NumPy 2.5."""
    PATCH(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


if INTERPRETING:
    from triton.runtime import interpreter

    PATCH, interpreter._patch_lang_tensor = interpreter._patch_lang_tensor, whole_numbers
    lowering = mlir.lower_fun(interpret, multiple_results=True)
    mlir.register_lowering(triton_kernel, lowering, platform="cpu")
