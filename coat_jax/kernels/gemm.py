"""The three matrix products of a linear layer, on FP8 operands or on arrays of any other dtype.

    product             y  = x w         x [..., K]  w [K, N]    both E4M3
    product_transposed  dx = dy w^T      dy [..., N] w [K, N]    E5M2 and E4M3
    outer_product       dw = x^T dy      x [..., K]  dy [..., N] E4M3 and E5M2

An FP8 operand has one scale, computed just in time: the least power of two with which its largest
element, or a bound of it where that is cheaper, fits the format. Powers of two multiply exactly in
any dtype, so the scale of a product is folded into the GEMM, also in BF16. On NVIDIA GPUs each
product is one FP8 GEMM of cuBLASLt, whose sums have about 14 bits on Hopper, or a sum in FP32 that
XLA fuses where one side is a single row. Elsewhere operands are converted to FP32.

`product_of_codes` is a product of codes alone, for scales that are not one number per operand.

Operands of a simulated format (`numerics.minifloat`) are values in BF16 or FP32. Their products are
computed in BF16 if both sides are BF16, else in FP32, and are exact except for the order of sums.

If the largest element is NaN or infinite, the scale and all results are NaN: they cannot be taken
for large numbers. If the scale comes from a bound, only the row of that element becomes NaN.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax.errors import UserError
from coat_jax.kernels import dispatch
from coat_jax.kernels.cast import Layout, cast
from coat_jax.kernels.dispatch import Implementation
from coat_jax.numerics.blocks import fitting_exponent, power_of_two
from coat_jax.numerics.formats import round_at_random, saturating_cast
from coat_jax.numerics.noise import NoiseStream, of_elements

# One FP8 GEMM of cuBLASLt. By default XLA would also try its own Triton GEMMs for every product:
# programs then take up to 40 times as long to compile, and run no faster.
FP8 = lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM
# By how much rounding may enlarge a sum of products that reaches its bound. Once for every 32
# products, Hopper's tensor cores drop up to 2^-13 of the sum so far: 2^-6 for 4096 products. The
# result in BF16 adds 2^-9.
SUM_ROUNDING = 1 + 2.0**-5
MOST_INT8_COLUMNS = (2**31 - 1) // 128**2


class Operand(NamedTuple):
    """One side of a product: FP8 codes and their scale, or an array of another dtype and None.

    A kernel makes the codes in one layout only, or in both.
    """

    values: Float[Array, "*rows K"] | None
    transposed: Float[Array, " K *rows"] | None
    scale: Float[Array, ""] | None
    lengths: Float[Array, "*rows"] | None = None  # the Euclidean length of each row


def operand(
    x: Float[Array, "*rows K"],
    dtype: DTypeLike | None,
    layout: Layout = "straight",
    implementation: Implementation = "xla",
    *,
    scale: Float[Array, ""] | None = None,
    stream: NoiseStream | None = None,
    lengths: bool = False,
) -> Operand:
    """Rounds `x` to FP8 with one scale; with dtype None leaves `x` as it is.

    Args:
        x: one side of a product.
        dtype: the format.
        layout: of the codes. "xla" ignores it and lets XLA transpose.
        implementation: "xla" or "triton".
        scale: by default the one that fits the largest magnitude.
        stream: random bits, to round stochastically; without them, rounds to nearest.
        lengths: whether to compute the lengths of the rows.
    """
    if dtype is None:
        return Operand(x, None, None)
    if scale is None:
        scale = tensor_scale(largest_magnitude(x), dtype)
    if implementation == "triton":
        codes, transposed, of_rows = cast(x, scale, dtype, layout, stream=stream, lengths=lengths)
        return Operand(codes, transposed, scale, of_rows)
    y = x.astype(jnp.float32) * (1.0 / scale)
    if stream is not None:
        y = round_at_random(y, dtype, of_elements(y.shape, stream))
    codes = saturating_cast(y, dtype)
    if not lengths:
        return Operand(codes, None, scale)
    # The codes are squared before they are scaled, and so cannot overflow.
    squares = jnp.sum(jnp.square(codes.astype(jnp.float32)), axis=-1)
    return Operand(codes, None, scale, jnp.sqrt(squares) * scale)


def largest_magnitude(x: Float[Array, "..."]) -> Float[Array, ""]:
    """max |x|, in FP32; NaN if x has one, unless XLA overlooks it, as it may on CPUs."""
    return jnp.max(jnp.abs(x), initial=0).astype(jnp.float32)


def tensor_scale(
    amax: Float[Array, ""], dtype: DTypeLike, axes: tuple[str, ...] = ()
) -> Float[Array, ""]:
    """The scale of an operand whose largest magnitude is `amax`.

    Inside `jax.shard_map` this is the largest on any device along `axes`.
    """
    if axes:
        amax = lax.pmax(amax, axes)
    scale = power_of_two(jnp.minimum(fitting_exponent(amax, dtype), 253))
    return jnp.where(jnp.isfinite(amax), scale, jnp.nan)


def product(x: Operand, w: Operand, dtype: DTypeLike) -> Float[Array, "*rows N"]:
    """x w: the forward product. Takes x straight, and w straight or, faster, transposed."""
    return _dot(x, w, "columns", "rows", dtype)


def product_transposed(dy: Operand, w: Operand, dtype: DTypeLike) -> Float[Array, "*rows K"]:
    """dy w^T: the gradient of the input. Takes both straight."""
    return _dot(dy, w, "columns", "columns", dtype)


def bound_of_product_transposed(dy: Operand, w: Operand) -> Float[Array, "*rows"]:
    """An upper bound of the magnitudes in each row of dy w^T, for operands that have lengths.

    A sum of products is at most the product of the two rows' lengths (Cauchy-Schwarz).
    """
    assert dy.lengths is not None
    assert w.lengths is not None
    return SUM_ROUNDING * dy.lengths * jnp.max(w.lengths)


def outer_product(x: Operand, dy: Operand, dtype: DTypeLike) -> Float[Array, "K N"]:
    """x^T dy, summed over all rows: the gradient of the weight. Faster with both transposed."""
    return _dot(x, dy, "rows", "rows", dtype)


def is_row(x: Array) -> bool:
    """Whether an array [..., K] has one row, as when one text is generated."""
    return math.prod(x.shape[:-1]) == 1


def product_of_row(x: Float[Array, "*one K"], w: Array) -> Float[Array, "*one N"]:
    """x w^T in FP32, as a sum that reads each byte of codes w once.

    A GEMM of cuBLASLt would pad x to 16 rows in FP8, and in BF16 read a copy of w.
    """
    sums = jnp.sum(x.astype(jnp.float32).reshape(-1) * w.astype(jnp.float32), axis=1)
    return sums.reshape(*x.shape[:-1], -1)


def product_of_codes(x: Array, w: Array, dtype: DTypeLike) -> Array:
    """x w^T of 8-bit codes [..., K] and [N, K], whose scales multiply the result afterwards.

    INT8 codes give an exact result in INT32; FP8 codes that of `product_transposed`, in `dtype`.
    FP8 codes of x must come from values that were rounded before the cast, as by `formats.nearest`.
    Otherwise XLA may drop the cast here, and with it the rounding.
    """
    if x.dtype != jnp.int8:
        if is_row(x):  # XLA itself does so with INT8 codes
            return product_of_row(x, w).astype(dtype)
        # XLA would merge small products of one x, and for that copy their weights into one array.
        x, w = lax.optimization_barrier((x, w))
        one = jnp.ones((), jnp.float32)
        return product_transposed(Operand(x, None, one), Operand(w, None, one), dtype)
    if x.shape[-1] > MOST_INT8_COLUMNS:
        raise UserError(
            f"A sum of {x.shape[-1]} products of INT8 codes may exceed INT32: "
            f"{MOST_INT8_COLUMNS} is the most. Use FP8 for a layer with so many inputs: a "
            "precision with other forward_products, such as coat.COAT, or weights quantized to FP8."
        )
    dimensions = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(x, w, dimensions, preferred_element_type=jnp.int32)


def scale_sums(
    sums: Array, row_scale: Float[Array, "*rows"], column_scale: Float[Array, " N"]
) -> Float[Array, "*rows N"]:
    """Sums of codes times the scales of their rows and columns, in FP32."""
    rows = row_scale[..., None]
    # Multiply by the smaller scale first: in the other order an ordinary result may overflow in
    # between. If a scale is NaN, it is still one of the two factors.
    smaller = jnp.where(rows < column_scale, rows, column_scale)
    larger = jnp.where(rows < column_scale, column_scale, rows)
    return sums.astype(jnp.float32) * smaller * larger


def _summed(x: Operand, over: str) -> tuple[Array, tuple[int, ...]]:
    """The array of an operand that is summed over its "rows" or "columns", and these axes of it."""
    if over == "rows" and x.transposed is not None:
        return x.transposed, tuple(range(1, x.transposed.ndim))
    if x.values is None:
        raise ValueError("This product needs its operand straight.")
    columns = x.values.ndim - 1
    return x.values, tuple(range(columns)) if over == "rows" else (columns,)


def _dot(
    left: Operand, right: Operand, over_left: str, over_right: str, dtype: DTypeLike
) -> Float[Array, "..."]:
    """The product of two operands, summed over the rows or the columns of each."""
    (a, a_axes), (b, b_axes) = _summed(left, over_left), _summed(right, over_right)
    dimensions = ((a_axes, b_axes), ((), ()))
    if left.scale is None or right.scale is None:
        return lax.dot_general(a, b, dimensions, preferred_element_type=dtype)

    # A product of codes is up to 448^2, which FP16 cannot hold until it is scaled.
    wide = jnp.float32 if dtype == jnp.float16 else dtype
    # Sharding is not known yet while tracing. With no more rows than devices, a device may have a
    # single row, which is a vector.
    most_shards = max(jax.sharding.get_abstract_mesh().size, jax.device_count())
    rows, columns = (math.prod(np.delete(c.shape, axes)) for c, axes in ((a, a_axes), (b, b_axes)))
    # XLA has no FP8 algorithm for a vector: DEFAULT lets XLA choose, whatever
    # jax_default_matmul_precision says. From JAX 0.12 on, a program that names an algorithm cannot
    # be compiled on a machine without a GPU (docs/upstream.md).
    names = jax.__version_info__ < (0, 12) or jax.local_devices()[0].platform == "gpu"
    algorithm = FP8 if names and min(rows, columns) > most_shards else lax.Precision.DEFAULT
    in_fp8 = partial(
        lax.dot_general,
        dimension_numbers=dimensions,
        precision=algorithm,
        preferred_element_type=wide,
    )

    def in_bf16(a: Array, b: Array) -> Array:
        a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
        return lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32).astype(wide)

    def in_fp32(a: Array, b: Array) -> Array:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return lax.dot_general(a, b, dimensions, precision=lax.Precision.HIGHEST).astype(wide)

    if max(a.dtype.itemsize, b.dtype.itemsize) > 1:  # a simulated format
        fit_bf16 = all(c.dtype == jnp.bfloat16 or c.dtype.itemsize == 1 for c in (a, b))
        result = in_bf16(a, b) if fit_bf16 else in_fp32(a, b)
    elif (dispatch.gpu_capability() or dispatch.HOPPER) >= dispatch.FIRST_WITH_FP8:
        result = lax.platform_dependent(a, b, cuda=in_fp8, default=in_fp32)
    else:
        result = in_fp32(a, b)
    return (result * (left.scale * right.scale).astype(wide)).astype(dtype)
