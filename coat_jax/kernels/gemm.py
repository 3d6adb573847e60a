"""The three matrix products of a linear layer, on FP8 operands or on arrays as they come.

    product             y  = x w         x [..., K]  w [K, N]    both E4M3
    product_transposed  dx = dy w^T      dy [..., N] w [K, N]    E5M2 and E4M3
    outer_product       dw = x^T dy      x [..., K]  dy [..., N] E4M3 and E5M2, K and N kept

An FP8 operand has one scale, just in time: the least power of two with which its largest
member fits the format. Powers of two multiply exactly in any dtype, so the scale of a product
is folded into the GEMM, in BF16 as well. Sums are FP32. On NVIDIA GPUs each product is one FP8
GEMM of cuBLASLt; elsewhere the operands are converted to FP32, with the same result but for
the order of sums.

An operand with a NaN or an infinity has a scale that is not a number, and so has all that
comes of it: it cannot pass for a large number.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax.blocks import fitting_exponent, power_of_two
from coat_jax.formats import format_of, saturating_cast

FP8 = lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM


class Operand(NamedTuple):
    """One side of a product: FP8 codes and their scale, or an array and None."""

    values: Float[Array, "..."]
    scale: Float[Array, ""] | None


def operand(x: Float[Array, "..."], dtype: DTypeLike | None) -> Operand:
    """Rounds `x` to FP8 with one scale; with dtype None leaves it as it is."""
    if dtype is None:
        return Operand(x, None)
    amax = jnp.max(jnp.abs(x), initial=0).astype(jnp.float32)
    return scaled(x, tensor_scale(amax, dtype), dtype)


def tensor_scale(amax: Float[Array, ""], dtype: DTypeLike) -> Float[Array, ""]:
    """The scale of an operand whose largest magnitude is `amax`."""
    scale = power_of_two(jnp.minimum(fitting_exponent(amax, dtype), 253))
    return jnp.where(jnp.isfinite(amax), scale, jnp.nan)


def scaled(x: Float[Array, "..."], scale: Float[Array, ""], dtype: DTypeLike) -> Operand:
    """Rounds `x` to FP8 with a scale that is known."""
    format_of(dtype)
    return Operand(saturating_cast(x.astype(jnp.float32) * (1.0 / scale), dtype), scale)


def product(x: Operand, w: Operand, dtype: DTypeLike) -> Float[Array, "*rows N"]:
    """x w: the forward product."""
    return _dot(x, w, ((x.values.ndim - 1,), (0,)), dtype)


def product_transposed(dy: Operand, w: Operand, dtype: DTypeLike) -> Float[Array, "*rows K"]:
    """dy w^T: the gradient of the input."""
    return _dot(dy, w, ((dy.values.ndim - 1,), (1,)), dtype)


def outer_product(x: Operand, dy: Operand, dtype: DTypeLike) -> Float[Array, "K N"]:
    """x^T dy, summed over all rows: the gradient of the weight."""
    rows = tuple(range(x.values.ndim - 1))
    return _dot(x, dy, (rows, rows), dtype)


def _dot(
    a: Operand, b: Operand, axes: tuple[tuple[int, ...], tuple[int, ...]], dtype: DTypeLike
) -> Float[Array, "..."]:
    dimensions = (axes, ((), ()))
    if a.scale is None or b.scale is None:
        return lax.dot_general(a.values, b.values, dimensions, preferred_element_type=dtype)

    # A product of codes is up to 448^2, which FP16 cannot hold before it is scaled.
    wide = jnp.float32 if dtype == jnp.float16 else dtype

    def in_fp8(a: Array, b: Array) -> Array:
        return lax.dot_general(a, b, dimensions, precision=FP8, preferred_element_type=wide)

    def in_fp32(a: Array, b: Array) -> Array:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return lax.dot_general(a, b, dimensions, precision=lax.Precision.HIGHEST).astype(wide)

    result = lax.platform_dependent(a.values, b.values, cuda=in_fp8, default=in_fp32)
    return (result * (a.scale * b.scale).astype(wide)).astype(dtype)
