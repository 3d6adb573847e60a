"""The three matrix products of a linear layer, on FP8 operands or on arrays as they come.

    product             y  = x w         x [..., K]  w [K, N]    both E4M3
    product_transposed  dx = dy w^T      dy [..., N] w [K, N]    E5M2 and E4M3
    outer_product       dw = x^T dy      x [..., K]  dy [..., N] E4M3 and E5M2, K and N kept

An FP8 operand has one scale, just in time: the least power of two with which its largest
member fits the format, or what bounds that member where a bound comes for less. Powers of two
multiply exactly in any dtype, so the scale of a product is folded into the GEMM, in BF16 as
well. Sums are FP32. On NVIDIA GPUs each product is one FP8 GEMM of cuBLASLt, or where one side is
a single row, a sum that XLA fuses; elsewhere the operands are converted to FP32. The results are
the same but for the order of sums.

A largest member that is NaN or infinite gives a scale that is not a number, and so is all that
comes of it: it cannot pass for a large number. Under a bound it is its row that is not.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax.kernels import dispatch
from coat_jax.kernels.cast import (
    Layout,
    cast,
    cast_reference,
    cast_with_lengths,
    lengths_reference,
)
from coat_jax.kernels.dispatch import Implementation
from coat_jax.numerics.blocks import fitting_exponent, power_of_two

# One FP8 GEMM of cuBLASLt. By default XLA would also try its own Triton GEMMs for every product:
# programs then take up to 40 times as long to compile, and run no faster.
FP8 = lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM
# By how much rounding may enlarge a sum of products that reaches its bound. Hopper's tensor cores
# drop what is 2^-13 of the sum so far or less, once for every 32 products: 2^-6 for 4096 of them.
# The result in BF16 adds 2^-9.
SUM_ROUNDING = 1 + 2.0**-5


class Operand(NamedTuple):
    """One side of a product: FP8 codes and their scale, or an array and None.

    Where a kernel made the codes, they may be there in one layout only, or in both. The Euclidean
    length of each row is there where `measured` made them.
    """

    values: Float[Array, "*rows K"] | None
    transposed: Float[Array, "K *rows"] | None
    scale: Float[Array, ""] | None
    lengths: Float[Array, "*rows"] | None = None


def operand(
    x: Float[Array, "*rows K"],
    dtype: DTypeLike | None,
    layout: Layout = "straight",
    implementation: Implementation = "xla",
) -> Operand:
    """Rounds `x` to FP8 with one scale; with dtype None leaves it as it is."""
    if dtype is None:
        return Operand(x, None, None)
    scale = tensor_scale(largest_magnitude(x), dtype)
    return scaled(x, scale, dtype, layout, implementation)


def largest_magnitude(x: Float[Array, "..."]) -> Float[Array, ""]:
    """max |x|, in FP32; NaN if there is one."""
    return jnp.max(jnp.abs(x), initial=0).astype(jnp.float32)


def tensor_scale(amax: Float[Array, ""], dtype: DTypeLike) -> Float[Array, ""]:
    """The scale of an operand whose largest magnitude is `amax`."""
    scale = power_of_two(jnp.minimum(fitting_exponent(amax, dtype), 253))
    return jnp.where(jnp.isfinite(amax), scale, jnp.nan)


def scaled(
    x: Float[Array, "*rows K"],
    scale: Float[Array, ""],
    dtype: DTypeLike,
    layout: Layout = "straight",
    implementation: Implementation = "xla",
) -> Operand:
    """Rounds `x` to FP8 with a scale that is known; XLA transposes by itself where it must."""
    if implementation == "xla":
        return Operand(cast_reference(x, scale, dtype, "straight")[0], None, scale)
    return Operand(*cast(x, scale, dtype, layout), scale)


def measured(
    x: Float[Array, "*rows K"],
    scale: Float[Array, ""],
    dtype: DTypeLike,
    layout: Layout,
    implementation: Implementation,
) -> Operand:
    """As `scaled`, with the lengths of the rows."""
    if implementation == "xla":
        codes, _ = cast_reference(x, scale, dtype, "straight")
        assert codes is not None
        return Operand(codes, None, scale, lengths_reference(codes, scale))
    straight, transposed, lengths = cast_with_lengths(x, scale, dtype, layout)
    return Operand(straight, transposed, scale, lengths)


def product(x: Operand, w: Operand, dtype: DTypeLike) -> Float[Array, "*rows N"]:
    """x w: the forward product. Takes x straight and w, better, transposed."""
    return _dot(x, w, _over_columns(x), _over_rows(w), dtype)


def product_transposed(dy: Operand, w: Operand, dtype: DTypeLike) -> Float[Array, "*rows K"]:
    """dy w^T: the gradient of the input. Takes both straight."""
    return _dot(dy, w, _over_columns(dy), _over_columns(w), dtype)


def bound_of_product_transposed(dy: Operand, w: Operand) -> Float[Array, "*rows"]:
    """What no magnitude in each row of dy w^T exceeds, of operands that are `measured`.

    A sum of products is at most the product of the two rows' lengths (Cauchy and Schwarz).
    """
    if dy.lengths is None or w.lengths is None:
        raise ValueError("A product has a bound where both of its operands are measured.")
    return SUM_ROUNDING * dy.lengths * jnp.max(w.lengths)


def outer_product(x: Operand, dy: Operand, dtype: DTypeLike) -> Float[Array, "K N"]:
    """x^T dy, summed over all rows: the gradient of the weight. Takes both, better, transposed."""
    return _dot(x, dy, _over_rows(x), _over_rows(dy), dtype)


Side = tuple[Array, tuple[int, ...]]  # an array, and its axes that are summed over


def _over_columns(x: Operand) -> Side:
    if x.values is None:
        raise ValueError("This product needs its operand straight.")
    return x.values, (x.values.ndim - 1,)


def _over_rows(x: Operand) -> Side:
    if x.transposed is not None:
        return x.transposed, tuple(range(1, x.transposed.ndim))
    values, (columns,) = _over_columns(x)
    return values, tuple(range(columns))


def _dot(
    left: Operand, right: Operand, left_side: Side, right_side: Side, dtype: DTypeLike
) -> Float[Array, "..."]:
    (a, a_axes), (b, b_axes) = left_side, right_side
    dimensions = ((a_axes, b_axes), ((), ()))
    if left.scale is None or right.scale is None:
        return lax.dot_general(a, b, dimensions, preferred_element_type=dtype)

    # A product of codes is up to 448^2, which FP16 cannot hold before it is scaled.
    wide = jnp.float32 if dtype == jnp.float16 else dtype
    narrow = min(_kept_size(left_side), _kept_size(right_side)) <= _most_shards()

    def in_fp8(a: Array, b: Array) -> Array:
        # XLA has no FP8 algorithm for a vector. DEFAULT, whatever jax_default_matmul_precision is.
        how = lax.Precision.DEFAULT if narrow else FP8
        return lax.dot_general(a, b, dimensions, precision=how, preferred_element_type=wide)

    def in_fp32(a: Array, b: Array) -> Array:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return lax.dot_general(a, b, dimensions, precision=lax.Precision.HIGHEST).astype(wide)

    if dispatch.multiplies_fp8():
        result = lax.platform_dependent(a, b, cuda=in_fp8, default=in_fp32)
    else:
        result = in_fp32(a, b)
    return (result * (left.scale * right.scale).astype(wide)).astype(dtype)


def _kept_size(side: Side) -> int:
    """How many rows (or columns) a side of the product gives to the result."""
    array, summed = side
    return math.prod(size for axis, size in enumerate(array.shape) if axis not in summed)


def _most_shards() -> int:
    """The most devices that rows may be sharded over: with no more rows, one may have a single row.

    Sharding is not known yet when a program is traced.
    """
    return max(jax.sharding.get_abstract_mesh().size, jax.device_count())
