"""A linear layer whose weight is frozen in FP8, with a low-rank adapter that trains (LoRA).

    y = x w + b + (x a) c          w [K, N] as FP8 codes and one scale,  a [K, R],  c [R, N]

The codes are those that `linear` would compute from the weight at every call, so freezing it loses
no more than FP8 products do. A frozen weight takes one byte per parameter, and the backward pass
neither rounds it again nor computes its gradient. x is rounded once for both w and a, and saved
once, in FP8. The product with c is not in FP8, because x a has few columns.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax.errors import UserError
from coat_jax.kernels import gemm
from coat_jax.kernels.dispatch import Implementation
from coat_jax.kernels.gemm import Operand
from coat_jax.kernels.sharding import as_3d
from coat_jax.numerics.explicit_axes import explicit_spec, merge_specs, shard_inside
from coat_jax.numerics.minifloat import Minifloat
from coat_jax.ops.backward import batched_alike, define_op
from coat_jax.ops.checks import require_columns, require_layers, require_real
from coat_jax.ops.saved.projection import (
    Mode,
    as_operand,
    gradient_operand,
    mode_of,
    recompute_weight,
)
from coat_jax.precision import COAT, Precision


class Frozen(NamedTuple):
    """A weight in FP8: codes times scale, which is a power of two."""

    codes: Float[Array, "K N"]
    scale: Float[Array, ""]


def freeze(weight: Float[Array, "K N"], *, precision: Precision | str = COAT) -> Frozen:
    """Rounds a weight to FP8, once for all steps."""
    require_real("freeze", weight)
    weight = jnp.asarray(weight)  # NumPy's FP64 becomes FP32
    mode = mode_of(precision, "xla")
    if isinstance(mode.format, Minifloat):
        raise ValueError(
            f"freeze stores a weight in FP8, and {mode.format.name} is simulated: its codes would "
            "take as much memory as the weight. Use coat.FP8_LINEAR or coat.COAT."
        )
    if weight.ndim != 2:
        raise ValueError(f"freeze rounds one weight [K, N], not an array of shape {weight.shape}.")
    if mode.format is None:
        raise ValueError(
            f"freeze rounds a weight to the FP8 of a precision with fp8_linear, and "
            f"{mode.precision} has none. Use coat.FP8_LINEAR or coat.COAT."
        )
    _require_fp8_products("freeze", mode)
    rounded = gemm.operand(weight, mode.format)
    assert rounded.values is not None
    assert rounded.scale is not None
    return Frozen(rounded.values, rounded.scale)


def _require_fp8_products(name: str, mode: Mode) -> None:
    if mode.precision.int8_forward:
        raise UserError(
            f"{name} is for weights whose FP8 codes are multiplied, and int8_forward multiplies in "
            "INT8. Use a precision without it, such as coat.COAT."
        )


def adapted_linear(
    x: Float[Array, "*rows K"],
    weight: Frozen,
    adapter: tuple[Float[Array, "K R"], Float[Array, "R N"]],
    bias: Float[Array, " N"] | None = None,
    *,
    precision: Precision | str = COAT,
    implementation: Implementation | None = None,
) -> Float[Array, "*rows N"]:
    """x w + b + (x a) c, with gradients for everything but w.

    Args:
        x: the input, of any leading shape.
        weight: w, from `freeze`.
        adapter: a and c; both train.
        bias: b, or None.
        precision: a `coat.Precision` with fp8_linear and without int8_forward, or its name.
        implementation: "xla", "triton", or None to choose by the device.
    """
    require_columns("adapted_linear", x)
    x = jnp.asarray(x)  # NumPy's FP64 becomes FP32
    if not isinstance(weight, Frozen):
        raise TypeError(
            f"adapted_linear takes a weight from coat.ops.freeze, not {type(weight).__name__}."
        )
    if not isinstance(adapter, Sequence) or len(adapter) != 2:
        raise TypeError(
            f"adapted_linear takes an adapter of two arrays, not {type(adapter).__name__}."
        )
    a, c = adapter
    if weight.codes.ndim != 2 or weight.codes.shape[0] != x.shape[-1]:
        raise ValueError(
            f"adapted_linear got an input with {x.shape[-1]} columns and a frozen weight of shape "
            f"{weight.codes.shape}: it should be [{x.shape[-1]}, N]."
        )
    require_layers("adapted_linear", x.shape[-1], (a,), (None,))
    require_layers("adapted_linear's adapter", a.shape[-1], (c,), (bias,))
    if c.shape[1] != weight.codes.shape[1]:
        raise ValueError(
            f"adapted_linear got an adapter with {c.shape[1]} outputs for a weight with "
            f"{weight.codes.shape[1]}."
        )
    mode = mode_of(precision, implementation)
    _require_fp8_products("adapted_linear", mode)
    if mode.format != weight.codes.dtype:
        fmt = mode.format if isinstance(mode.format, Minifloat | None) else jnp.dtype(mode.format)
        products = "without FP8" if fmt is None else f"in {fmt.name}"
        raise ValueError(
            f"The weight is frozen as {weight.codes.dtype.name}, but this precision multiplies "
            f"{products}. Freeze it with the precision of the product."
        )

    def op(x: Array, weight: Frozen, a: Array, c: Array, bias: Array | None) -> Array:
        y, h = _products(mode, as_3d(x), weight, a, None)  # without telemetry
        y = y + (h @ c.astype(x.dtype))
        y = y if bias is None else y + bias.astype(x.dtype)
        return y.reshape(*x.shape[:-1], y.shape[-1])

    def result() -> PartitionSpec:
        return merge_specs(*explicit_spec(x)[:-1], explicit_spec(weight.codes)[1])

    y: Array = shard_inside(op, result, x, weight, a, c, bias)
    return y


def _products_forward(mode: Mode, x: Array, weight: Frozen, a: Array) -> Any:
    n = as_operand(x, x.dtype, mode)
    narrow = as_operand(a, x.dtype, mode, "transposed")
    y, h = (gemm.product(n, w, x.dtype) for w in (_operand(weight), narrow))
    return batched_alike(y, h), (n, weight, a, narrow.scale), lambda probe: probe


def _products_backward(
    mode: Mode, n: Operand, weight: Frozen, a: Array, scale: Array, gradients: tuple[Array, Array]
) -> Any:
    dtype: DTypeLike = gradients[0].dtype
    dy, dh = (gradient_operand(g, mode) for g in gradients)
    narrow = recompute_weight(a, scale, dtype, mode)
    dx = gemm.product_transposed(dy, _operand(weight), dtype)
    dx = gemm.product_transposed(dh, narrow, dtype) + dx
    return (dx, None, gemm.outer_product(n, dh, a.dtype)), lambda probe: probe


_products = define_op(
    "adapted_linear", _products_forward, _products_backward, rounds=lambda mode: True
)


def _operand(weight: Frozen) -> Operand:
    return Operand(weight.codes, None, weight.scale)
