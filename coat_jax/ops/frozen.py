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
from coat_jax.numerics.explicit_axes import explicit_spec, merge_specs, shard_inside
from coat_jax.numerics.formats import format_of
from coat_jax.numerics.minifloat import Minifloat
from coat_jax.ops.checks import require_real
from coat_jax.ops.definition import batch_alike, define_op
from coat_jax.ops.projection import (
    Layers,
    Mode,
    as_layers,
    as_operand,
    gradient_operand,
    input_gradient,
    mode_of,
)
from coat_jax.precision import COAT, Precision
from coat_jax.validation import brief


class Frozen(NamedTuple):
    """A weight in FP8: codes times scale, which is a power of two."""

    codes: Float[Array, "K N"]
    scale: Float[Array, ""]


def freeze(weight: Float[Array, "K N"], *, precision: Precision | str = COAT) -> Frozen:
    """Rounds a weight to FP8, once for all steps."""
    require_real("freeze", weight)
    weight = jnp.asarray(weight)  # NumPy's FP64 becomes FP32
    if weight.ndim != 2:
        raise ValueError(f"freeze rounds one weight [K, N], not an array of shape {weight.shape}.")
    rounded = gemm.operand(weight, _fp8_mode("freeze", precision, "xla").format)
    assert rounded.values is not None
    assert rounded.scale is not None
    return Frozen(rounded.values, rounded.scale)


def _fp8_mode(name: str, precision: Precision | str, implementation: Implementation | None) -> Mode:
    mode = mode_of(precision, implementation)
    stores = mode.format is not None and not isinstance(mode.format, Minifloat)
    if not stores or mode.precision.forward_products != "fp8":
        raise UserError(
            f"{name} takes a precision that multiplies in FP8, not simulated and with "
            f'forward_products="fp8", such as coat.COAT; not {brief(precision)}.'
        )
    return mode


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
        precision: a `coat.Precision` that multiplies in FP8 in both passes, or its name.
        implementation: "xla", "triton", or None to choose by the device.
    """
    require_real("adapted_linear", x, least_rank=1)
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
    as_layers("adapted_linear", x.shape[-1], (a,), None)
    as_layers("adapted_linear's adapter", a.shape[-1], (c,), (bias,))
    if weight.codes.shape != (x.shape[-1], c.shape[1]):
        raise ValueError(
            f"adapted_linear got an input with {x.shape[-1]} columns, an adapter with {c.shape[1]} "
            f"outputs and a frozen weight of shape {weight.codes.shape}, which does not fit them."
        )
    mode = _fp8_mode("adapted_linear", precision, implementation)
    if mode.format != weight.codes.dtype:
        raise ValueError(
            f"The weight is frozen as {weight.codes.dtype.name}, but this precision multiplies in "
            f"{format_of(mode.precision.forward).name}. Use the precision that it was frozen with."
        )

    def op(x: Array, weight: Frozen, a: Array, c: Array, bias: Array | None) -> Array:
        y, h = _products(mode, (), x, weight, a)
        y = y + (h @ c.astype(x.dtype))
        return y if bias is None else y + bias.astype(x.dtype)

    def result() -> PartitionSpec:
        return merge_specs(*explicit_spec(x)[:-1], explicit_spec(weight.codes)[1])

    y: Array = shard_inside(op, result, x, weight, a, c, bias)
    return y


def _products_forward(mode: Mode, x: Array, weight: Frozen, a: Array) -> Any:
    n = as_operand(x, x.dtype, mode)
    narrow = as_operand(a, x.dtype, mode, "transposed")
    y, h = (gemm.product(n, w, x.dtype) for w in (_operand(weight), narrow))
    return batch_alike(y, h), (n, weight, a, narrow.scale), dict


def _products_backward(
    mode: Mode, n: Operand, weight: Frozen, a: Array, scale: Array, gradients: tuple[Array, Array]
) -> Any:
    dtype: DTypeLike = gradients[0].dtype
    dy, dh = (gradient_operand(g, mode) for g in gradients)
    dx = gemm.product_transposed(dy, _operand(weight), dtype)
    dx = input_gradient(Layers((a,), (None,)), (scale,), (dh,), dtype, mode) + dx
    return (dx, None, gemm.outer_product(n, dh, a.dtype)), dict


# Telemetry does not see what it rounds: it has names, but no statistics.
_products = define_op(
    "adapted_linear",
    _products_forward,
    _products_backward,
    operands=("input",),
    weights=("",),
    in_3d=True,
)


def _operand(weight: Frozen) -> Operand:
    return Operand(weight.codes, None, weight.scale)
