"""A linear layer for inference whose weight is codes of 8 or 4 bits.

    w[k, n] ~ codes[n, k] scale[n]         INT8 or E4M3: one byte a parameter, and 4 a channel
    w[k, n] ~ codes[n, k] scale[n, k/128]  INT4: half a byte, and 2 for 128 of a channel's inputs

    activations    x                               product
    "none"         as it is                        in the dtype of x: only memory is saved
    "static"       ~ codes a, one given number     of codes: INT8 in INT32, or FP8
    "dynamic"      ~ codes a[row], found in x      of codes: INT8 in INT32, or FP8

    y[t, n] = (sum over k of x codes[t, k] codes[n, k]) a[t] scale[n] + b[n]

With INT4 weights the codes of x are in E4M3; see `kernels.int4` for their product.

Codes are stored with outputs first, the layout in which GPUs multiply them, so no product
transposes its weight. With "static" and "dynamic" activations, differentiating with respect to x is
an error, because rounding has no gradient. To train, use `linear`, or an adapter on a weight from
`freeze`.

If a row of x has a NaN or an infinity, that row of y has no finite number. A static scale is the
exception: infinities saturate.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from coat_jax.errors import UserError
from coat_jax.kernels import few_rows, gemm, int4
from coat_jax.kernels.dispatch import Implementation, choose
from coat_jax.numerics import eight_bits, four_bits
from coat_jax.numerics.eight_bits import EightBits
from coat_jax.numerics.quantizer import Fit
from coat_jax.ops.checks import require_real

Activations = Literal["none", "static", "dynamic"]

ACTIVATION_MODES: tuple[Activations, ...] = get_args(Activations)
WeightFormat = Literal["int8", "fp8", "int4"]
WEIGHT_FORMATS: tuple[WeightFormat, ...] = get_args(WeightFormat)


class Quantized(NamedTuple):
    """A weight in 8 or 4 bits.

    Attributes:
        codes: [outputs, inputs], int8 or float8_e4m3fn; of INT4 uint8 with two codes each, as
            `numerics.four_bits` packs them.
        scale: one FP32 number for each output channel; of INT4 one in BF16 for each group.
        input_scale: the scale of "static" activations; None for the other modes.
        zero: of INT4, the code that stands for zero, for each group; None for 8 everywhere, with
            scales that are one number for each channel times powers of two.
    """

    codes: Array  # [N, K]
    scale: Float[Array, " N"] | Float[Array, "N G"]
    input_scale: Float[Array, ""] | None = None
    zero: UInt8[Array, "N G"] | None = None

    @property
    def format(self) -> WeightFormat:
        """The format of the codes."""
        is_packed = self.codes.dtype == jnp.uint8
        return "int4" if is_packed else eight_bits.format_of_codes(self.codes.dtype)

    def in_int4(self) -> int4.Weight:
        """The weight as the kernels of INT4 take it."""
        return int4.Weight(self.codes, self.scale, self.zero)


def quantize_weight(
    weight: Float[Array, "K N"],
    format: WeightFormat = "int8",
    *,
    fit: Fit = "mse",
    percentile: float = 99.9,
    input_scale: Float[Array, ""] | None = None,
) -> Quantized:
    """Rounds a weight to 8 or 4 bits.

    Args:
        weight: inputs times outputs.
        format: "int8", "fp8", or "int4", whose scales always have little squared error.
        fit: the range of each channel: up to its largest magnitude ("max"), up to a "percentile"
            of its magnitudes, or the range with the least squared error ("mse").
        percentile: how many of 100 magnitudes are within the range, for fit="percentile".
        input_scale: the scale of static activations, which is stored with the weight.
    """
    require_real("quantize_weight", weight)
    weight = jnp.asarray(weight)  # NumPy's FP64 becomes FP32
    if weight.ndim != 2:
        raise ValueError(f"quantize_weight rounds a weight [K, N], not of shape {weight.shape}.")
    if format not in WEIGHT_FORMATS:
        raise ValueError(f"format={format!r} must be one of {', '.join(WEIGHT_FORMATS)}.")
    if format == "int4":
        require_groups("quantize_weight", weight.shape[0])
        scales = four_bits.group_scales(weight.T)
        return Quantized(four_bits.encode(weight.T, scales), scales, input_scale)
    scale = eight_bits.channel_scales(weight, format, fit, percentile)
    return Quantized(eight_bits.encode(weight, scale, format).T, scale, input_scale)


def quantized_linear(
    x: Float[Array, "*rows K"],
    weight: Quantized,
    bias: Float[Array, " N"] | None = None,
    *,
    activations: Activations = "dynamic",
    implementation: Implementation | None = None,
) -> Float[Array, "*rows N"]:
    """x w + b, in the dtype of x.

    Args:
        x: the input, of any leading shape.
        weight: w, from `quantize_weight`.
        bias: b, or None.
        activations: how x is rounded: "none", "static" or "dynamic".
        implementation: of products of few rows with INT4: "xla", "triton", or None to choose by
            the device.

    Example:
        >>> import coat_jax as coat, jax.numpy as jnp
        >>> weight = coat.ops.quantize_weight(jnp.eye(64), "int8")
        >>> weight.codes.dtype.name
        'int8'
        >>> coat.ops.quantized_linear(jnp.ones((8, 64)), weight).shape
        (8, 64)
    """
    x = _require_fit(x, weight, bias, activations)
    wide = _wide(x.dtype)
    if weight.format == "int4" and activations != "none":
        (y,) = _int4_products(x, [weight], choose(implementation))
    elif weight.format == "int4":
        values = four_bits.values(weight.codes, weight.scale, weight.zero)
        # FP16 may not hold them, BF16 may.
        y = jnp.matmul(x.astype(wide), values.astype(wide).T, preferred_element_type=jnp.float32)
    elif activations == "none" and gemm.is_row(x):
        y = gemm.product_of_row(x, weight.codes) * weight.scale
    elif activations == "none":
        codes = weight.codes.astype(x.dtype)
        y = jnp.matmul(x, codes.T, preferred_element_type=wide).astype(jnp.float32) * weight.scale
    else:
        rounded, row_scale = _round_rows(x, weight.input_scale, weight.format)
        sums = gemm.product_of_codes(rounded, weight.codes, wide)
        y = gemm.scale_sums(sums, row_scale[..., 0], weight.scale)
    return _with_bias(y, bias, x.dtype)


def quantized_linears(
    x: Float[Array, "*rows K"],
    weights: Sequence[Quantized],
    biases: Sequence[Float[Array, " N"] | None],
    *,
    activations: Activations = "dynamic",
    implementation: Implementation | None = None,
) -> list[Float[Array, "*rows N"]]:
    """`quantized_linear` of each weight. Those in INT4 share a kernel if x has few rows.

    With "static" activations each weight rounds x with its own scale, and has its own kernel.
    """
    if activations != "dynamic" or any(weight.format != "int4" for weight in weights):
        how: Any = {"activations": activations, "implementation": implementation}
        pairs = zip(weights, biases, strict=True)
        return [quantized_linear(x, weight, bias, **how) for weight, bias in pairs]
    for weight, bias in zip(weights, biases, strict=True):
        x = _require_fit(x, weight, bias, activations)
    outputs = _int4_products(x, weights, choose(implementation))
    return [_with_bias(y, bias, x.dtype) for y, bias in zip(outputs, biases, strict=True)]


def _require_fit(
    x: Float[Array, "*rows K"],
    weight: Quantized,
    bias: Float[Array, " N"] | None,
    activations: Activations,
) -> Float[Array, "*rows K"]:
    """x as an array; raises unless weight and bias fit."""
    require_real("quantized_linear", x, least_rank=1)
    x = jnp.asarray(x)  # NumPy's FP64 becomes FP32
    require_quantized("quantized_linear", weight, activations)
    of_byte = 2 if weight.format == "int4" else 1
    if weight.codes.ndim != 2 or of_byte * weight.codes.shape[1] != x.shape[-1]:
        columns = weight.codes.shape[-1] * of_byte
        raise ValueError(
            f"quantized_linear got an input with {x.shape[-1]} columns and codes of shape "
            f"{weight.codes.shape}, which are for {columns}."
        )
    if bias is not None and bias.shape != weight.scale.shape[:1]:
        raise ValueError(
            f"quantized_linear got a bias of shape {bias.shape}: it should be "
            f"{weight.scale.shape[:1]}, one number per output."
        )
    return x


def _wide(dtype: DTypeLike) -> DTypeLike:
    """FP16 cannot hold sums of codes. BF16 can: they are then rounded before they are scaled."""
    return jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32


def _with_bias(
    y: Float[Array, "*rows N"], bias: Float[Array, " N"] | None, dtype: DTypeLike
) -> Float[Array, "*rows N"]:
    return (y if bias is None else y + bias.astype(jnp.float32)).astype(dtype)


def _int4_products(
    x: Float[Array, "*rows K"], weights: Sequence[Quantized], how: Implementation
) -> list[Float[Array, "*rows N"]]:
    """Products with x in FP8, rounded with the static scale of the first weight if it has one."""
    packed = [weight.in_int4() for weight in weights]
    rows, given = math.prod(x.shape[:-1]), weights[0].input_scale
    if how == "triton" and given is None and few_rows.fits(rows, x.shape[-1]):
        rounded = few_rows.normalize(without_gradient(x).reshape(rows, -1), None)
    else:
        codes, scale = _round_rows(x, given, "fp8")
        if how == "xla" or not 0 < rows <= int4.FEW_ROWS:
            wide = _wide(x.dtype)
            return [int4.product_of_many_rows(codes, of, how, wide) * scale for of in packed]
        rounded = int4.Rows.of(codes.reshape(rows, -1), scale.reshape(rows))
    products = int4.products_of_few_rows(rounded, packed)
    return [product.total().reshape(*x.shape[:-1], -1) for product in products]


def row_scales(x: Float[Array, "*rows K"], name: EightBits) -> Float[Array, "*rows 1"]:
    """The scales of "dynamic" activations: from the largest magnitude of each row."""
    # As integers, magnitudes have the same order, and NaN is the largest: XLA's maximum of numbers
    # may lose a NaN on CPUs, and a second reduction would be another launch on GPUs.
    bits = lax.bitcast_convert_type(jnp.abs(x), f"uint{8 * x.dtype.itemsize}")
    largest = lax.bitcast_convert_type(jnp.max(bits, axis=-1, keepdims=True), x.dtype)
    scale = eight_bits.scale_of(largest.astype(jnp.float32), name)
    return jnp.where(jnp.isfinite(largest), scale, jnp.nan)


@jax.custom_jvp
def without_gradient(x: Array) -> Array:
    """x. To differentiate it is an error."""
    return x


@without_gradient.defjvp
def _refuse_gradient(primals: tuple[Array], tangents: tuple[Array]) -> Any:
    # JAX takes gradients of integers to be zero: parameters would silently not train.
    raise UserError(
        "A quantized layer that rounds its activations has no gradient: train the model that it "
        'was made from, or quantize with activations="none".'
    )


def _round_rows(
    x: Float[Array, "*rows K"], input_scale: Float[Array, ""] | None, name: EightBits
) -> tuple[Array, Float[Array, "*rows 1"]]:
    """The codes of an input, and the scale of each row."""
    x = without_gradient(x)
    if input_scale is None:
        scale = row_scales(x, name)
    else:
        lost = jnp.any(jnp.isnan(x), axis=-1, keepdims=True)
        scale = jnp.where(lost, jnp.nan, input_scale)
    return eight_bits.encode(x, scale, name), scale


def require_groups(name: str, inputs: int) -> None:
    """Raises unless the inputs of a weight can be divided into groups of INT4."""
    if inputs % four_bits.GROUP:
        raise UserError(
            f"{name}: a weight with {inputs} inputs cannot be in INT4, which has a scale for every "
            f"{four_bits.GROUP} of them. Leave it as it is (`leave` in a recipe), or use FP8."
        )


def require_quantized(name: str, weight: Quantized, activations: Activations) -> None:
    """Raises unless a weight is `Quantized`, and has what this mode of activations needs.

    Args:
        name: of the function or the module that takes them, for the error.
        weight: the weight.
        activations: the mode.
    """
    if not isinstance(weight, Quantized):
        raise TypeError(
            f"{name} takes a weight from coat.ops.quantize_weight, not {type(weight).__name__}."
        )
    if activations not in ACTIVATION_MODES:
        known = ", ".join(ACTIVATION_MODES)
        raise ValueError(f"activations={activations!r} must be one of {known}.")
    if (activations == "static") != (weight.input_scale is not None):
        there = "has none" if weight.input_scale is None else "has one"
        raise ValueError(
            f'activations="static" needs a weight with an input_scale, other modes one without; '
            f"activations={activations!r}, and the weight {there}."
        )
