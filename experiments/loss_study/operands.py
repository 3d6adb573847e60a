"""Rounds single operands of the layers' products to FP8, in a run that is otherwise in BF16.

    inputs        x of the forward product x w
    weights       w of both products that have it
    recomputed    x of a weight's gradient x^T dy
    gradients     dy of both products that have it

in the products of all layers, or of some:

    qkv    queries, keys and values        up      gate and up
    out    the output of attention         down    back to the width of the residual stream

COAT rounds all of them. Arms that round only some measure what these cost. Products are in BF16 and
their sums in FP32, so that nothing else of FP8 products takes part.
"""

import contextlib
import importlib
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, Literal, get_args
from unittest import mock

import jax
import jax.numpy as jnp

from coat_jax import E4M3, E5M2
from coat_jax.kernels import gemm
from coat_jax.numerics.formats import nearest
from coat_jax.ops.projection import Layers

Name = Literal["inputs", "weights", "recomputed", "gradients"]
NAMES: tuple[Name, ...] = get_args(Name)
Product = Literal["qkv", "out", "up", "down"]
ALL: tuple[Product, ...] = get_args(Product)
# The operands of each function of `gemm`, left and right.
PRODUCTS: dict[str, tuple[Name, Name]] = {
    "product": ("inputs", "weights"),
    "product_transposed": ("gradients", "weights"),
    "outer_product": ("recomputed", "gradients"),
}
# The modules of `coat_jax.ops` that have products, and which; and their functions that make them.
LAYERS: dict[str, tuple[Product, ...]] = {
    "qkv": ("qkv",),
    "attention": ("out",),
    "mlp": ("up", "down"),
}
OF_LAYERS = {"project", "input_gradient", "bounded_input_gradient", "parameter_gradients"}


@contextlib.contextmanager
def rounding(names: Collection[Name], products: Collection[Product] = ALL) -> Iterator[None]:
    """Layers that are traced in this context round these operands of these products."""
    if not names:
        yield
        return
    traced: list[str] = []  # the products that are being traced, where they are of `LAYERS`

    def rounds() -> bool:
        return {*products} == {*ALL} or (traced[-1:] != [] and traced[-1] in products)

    with contextlib.ExitStack() as stack:
        stack.callback(jax.clear_caches)
        for function, operands in PRODUCTS.items():
            rounded = [name in names for name in operands]
            _replace(stack, gemm, function, partial(_rounding, operands, rounded, rounds))
        for name, kinds in LAYERS.items():
            module = importlib.import_module(f"coat_jax.ops.{name}")
            for function in OF_LAYERS & vars(module).keys():
                _replace(stack, module, function, partial(_noting, traced, kinds))
        jax.clear_caches()  # of layers that were traced before
        yield


def _replace(
    stack: contextlib.ExitStack, module: Any, name: str, change: Callable[[Any], Any]
) -> None:
    stack.enter_context(mock.patch.object(module, name, change(getattr(module, name))))


def _noting(
    traced: list[str], kinds: tuple[Product, ...], function: Callable[..., Any]
) -> Callable[..., Any]:
    """A function of layers that notes which product it is, of (up, down) by how many share x."""

    def of_layers(*args: Any, **settings: Any) -> Any:
        (layers,) = (arg for arg in args if isinstance(arg, Layers))
        traced.append(kinds[0] if len(layers.weights) > 1 else kinds[-1])
        try:
            return function(*args, **settings)
        finally:
            traced.pop()

    return of_layers


def _rounding(
    operands: tuple[Name, Name],
    rounded: list[bool],
    rounds: Callable[[], bool],
    product: Callable[..., Any],
) -> Callable[..., Any]:
    def of_rounded(left: gemm.Operand, right: gemm.Operand, dtype: Any) -> Any:
        sides = zip((left, right), operands, rounded, strict=True)
        return product(
            *(_rounded(x, name) if on and rounds() else x for x, name, on in sides), dtype
        )

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
