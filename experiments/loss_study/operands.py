"""Rounds single operands of the layers' products to FP8, in a run that is otherwise in BF16.

    inputs        x of the forward product x w
    weights       w of both products that have it
    recomputed    x of a weight's gradient x^T dy
    gradients     dy of both products that have it

COAT rounds all of them. Arms that round only some measure what these cost. Products are in BF16 and
their sums in FP32, so that nothing else of FP8 products takes part.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from coat_jax import E4M3, E5M2
from coat_jax.kernels import gemm
from coat_jax.numerics.formats import nearest

Name = Literal["inputs", "weights", "recomputed", "gradients"]
NAMES: tuple[Name, ...] = get_args(Name)
# The operands of each function of `gemm`, left and right.
PRODUCTS: dict[str, tuple[Name, Name]] = {
    "product": ("inputs", "weights"),
    "product_transposed": ("gradients", "weights"),
    "outer_product": ("recomputed", "gradients"),
}


@contextlib.contextmanager
def rounding(names: Collection[Name]) -> Iterator[None]:
    """Layers that are traced in this context round these operands."""
    if not names:
        yield
        return
    exact = {function: getattr(gemm, function) for function in PRODUCTS}
    jax.clear_caches()  # of layers that were traced before
    try:
        for function, operands in PRODUCTS.items():
            rounds = [name in names for name in operands]
            setattr(gemm, function, _rounding(exact[function], operands, rounds))
        yield
    finally:
        for function, product in exact.items():
            setattr(gemm, function, product)
        jax.clear_caches()


def _rounding(
    product: Callable[..., Any], operands: tuple[Name, Name], rounds: list[bool]
) -> Callable[..., Any]:
    def of_rounded(left: gemm.Operand, right: gemm.Operand, dtype: Any) -> Any:
        sides = zip((left, right), operands, rounds, strict=True)
        return product(*(_rounded(x, name) if on else x for x, name, on in sides), dtype)

    return of_rounded


def _rounded(operand: gemm.Operand, name: Name) -> gemm.Operand:
    """The values of an operand's codes, in its dtype, which holds them exactly."""
    if operand.scale is not None or operand.values is None:
        raise ValueError("Single operands are rounded in BF16 only: this one is in FP8 already.")
    dtype = E5M2 if name == "gradients" else E4M3
    x = operand.values.astype(jnp.float32)
    scale = gemm.tensor_scale(gemm.largest_magnitude(x), dtype)
    # Not a cast to FP8 and back, which XLA leaves out on GPUs.
    values = nearest(x * (1.0 / scale), dtype) * scale
    return gemm.Operand(values.astype(operand.values.dtype), None, None)
