"""Sums the FP8 products of some operands in FP32, in a run that is otherwise COAT.

    gradient of the input     dy w^T
    gradient of the weight    x^T dy

coat_jax sums FP8 products as fast as Hopper can: in the accumulators of its tensor cores, which
keep 14 bits. The sum of a weight's gradient has one term for each token of the batch, so this may
raise the loss. Arms with accurate sums measure by how much: in them cuBLASLt adds partial sums up
in FP32, as TransformerEngine and torchao request in their backward passes.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any, Literal

import jax
from jax import lax

from coat_jax.kernels import gemm

Name = Literal["gradient of the input", "gradient of the weight"]
PRODUCTS: dict[Name, str] = {
    "gradient of the input": "product_transposed",
    "gradient of the weight": "outer_product",
}
ACCURATE = lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32


@contextlib.contextmanager
def accurate(names: Collection[Name]) -> Iterator[None]:
    """Layers that are traced in this context sum these products in FP32."""
    if not names:
        yield
        return
    fast = {PRODUCTS[name]: getattr(gemm, PRODUCTS[name]) for name in names}
    jax.clear_caches()  # of layers that were traced before
    try:
        for function, product in fast.items():
            setattr(gemm, function, _accurate(product))
        yield
    finally:
        for function, product in fast.items():
            setattr(gemm, function, product)
        jax.clear_caches()


def _accurate(product: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        fast, gemm.FP8 = gemm.FP8, ACCURATE
        try:
            return product(*args)
        finally:
            gemm.FP8 = fast

    return run
