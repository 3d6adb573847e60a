"""Several linear layers that share an input, forward and backward: all ops are built on these.

    y_i  = n w_i + b_i
    dn   = sum_i dy_i w_i^T        dw_i = n^T dy_i        db_i = sum over rows of dy_i

In FP8 the input is rounded to E4M3 once for all weights, and each gradient to E5M2. The backward
pass requantizes the weights with the scales of the forward pass, since saving their codes would
cost a byte a parameter. It also rounds each input that it recomputes from saved values. If
`Precision.stochastic_backward` is set, it rounds this input and the gradients stochastically.
`Precision.forward_products` decides what y is computed from, and nothing else: the backward pass is
the same.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax.errors import UserError
from coat_jax.kernels import dispatch, gemm, int8
from coat_jax.kernels.cast import Layout
from coat_jax.kernels.dispatch import Implementation
from coat_jax.kernels.gemm import Operand
from coat_jax.numerics.formats import E5M2, format_of
from coat_jax.numerics.noise import NoiseStream
from coat_jax.ops.checks import require_real
from coat_jax.precision import Precision, precision_of

Outputs = tuple[Float[Array, "*rows N"], ...]
Scales = tuple[Float[Array, ""] | None, ...]
Products = tuple[Float[Array, "*rows N"] | int8.Product, ...]


class Layers(NamedTuple):
    """Linear layers that share an input; also the gradients of their parameters."""

    weights: tuple[Float[Array, "K N"], ...]
    biases: tuple[Float[Array, " N"] | None, ...]


class Unrounded(NamedTuple):
    """An input of forward products in its own dtype.

    The backward pass rounds it to FP8 with this scale.
    """

    values: Float[Array, "*rows K"]
    scale: Float[Array, ""]


Input = Operand | int8.RowCodes | Unrounded  # of forward products


class Mode(NamedTuple):
    """How an op computes: precision and implementation, chosen when it is traced."""

    precision: Precision
    implementation: Implementation

    @property
    def format(self) -> DTypeLike | None:
        """The FP8 format of inputs and weights; None if they are not rounded."""
        return self.precision.forward if self.precision.fp8_linear else None

    def stream(self, operands: NoiseStream) -> NoiseStream | None:
        """The random bits for operands of the backward pass; None if it rounds to nearest."""
        return operands if self.precision.stochastic_backward else None

    @property
    def fused_block(self) -> int | None:
        """The block size of the fused kernels; None if `jnp` is used instead."""
        fused = self.implementation == "triton" and self.precision.fp8_linear
        return self.precision.block if fused else None


def mode_of(precision: Precision | str, implementation: Implementation | None) -> Mode:
    """Chooses precision and implementation; raises if the implementation cannot run."""
    precision = precision_of(precision)
    if precision.forward_products == "int8":
        dispatch.require_fast_int8()
    if precision.fp8_linear and not precision.simulated:
        return Mode(precision, dispatch.choose(implementation, products=True))
    if implementation == "triton" and precision.simulated:
        names = (format_of(f).name for f in (precision.forward, precision.backward))
        raise UserError(
            'implementation="triton" computes in E4M3 and E5M2, but this precision has '
            "forward={}, backward={}. ".format(*names)
            + "Leave implementation out: XLA simulates any format."
        )
    if implementation == "triton":
        raise ValueError(
            'implementation="triton" has kernels for products in FP8, but this precision has '
            f"fp8_linear={precision.fp8_linear}. Leave implementation out."
        )
    dispatch.choose(implementation)  # refuses other names
    return Mode(precision, "xla")


def as_operand(
    x: Float[Array, "*rows K"],
    dtype: DTypeLike,
    mode: Mode,
    layout: Layout = "straight",
    *,
    scale: Float[Array, ""] | None = None,
    lengths: bool = False,
) -> Operand:
    """An input or a weight as the operand of a product, in FP8 or in `dtype`."""
    if mode.format is None:
        x = x.astype(dtype)
    how = mode.format, layout, mode.implementation
    return gemm.operand(x, *how, scale=scale, lengths=lengths)


def quantize_input(x: Float[Array, "*rows K"], dtype: DTypeLike, mode: Mode) -> Input:
    """Returns an input of forward products: in FP8, in INT8, or in `dtype`."""
    if mode.precision.forward_products == "int8":
        return int8.round_rows(x, mode.implementation)
    if mode.precision.forward_products == "bf16":
        return Unrounded(x.astype(dtype), _scale_of(x, mode))
    return as_operand(x, dtype, mode)


def fp8_scale(n: Input, mode: Mode) -> Float[Array, ""] | None:
    """The scale with which the backward pass rounds an input, or a weight, to FP8."""
    return _scale_of(n.largest, mode) if isinstance(n, int8.RowCodes) else n.scale


def _scale_of(x: Float[Array, "..."], mode: Mode) -> Float[Array, ""]:
    """The scale with which `x` fits the FP8 format of inputs and weights."""
    assert mode.format is not None, "forward_products needs fp8_linear"
    return gemm.tensor_scale(gemm.largest_magnitude(x), mode.format)


def recompute_input(
    x: Float[Array, "*rows K"], scale: Float[Array, ""] | None, dtype: DTypeLike, mode: Mode
) -> Operand:
    """An input as the operand of the weights' gradients, with the scale of the forward pass."""
    if scale is None or mode.format is None:
        return Operand(x.astype(dtype), None, None)
    stream = mode.stream("inputs")
    return gemm.operand(
        x, mode.format, "transposed", mode.implementation, scale=scale, stream=stream
    )


def gradient_operand(
    dy: Float[Array, "*rows N"],
    mode: Mode,
    layout: Layout = "both",
    *,
    scale: Float[Array, ""] | None = None,
    lengths: bool = False,
) -> Operand:
    """A gradient as the operand of both products that need it, or of one."""
    dtype = None if mode.format is None else mode.precision.backward
    how = dtype, layout, mode.implementation
    return gemm.operand(dy, *how, scale=scale, stream=mode.stream("gradients"), lengths=lengths)


def project(
    n: Input, layers: Layers, dtype: DTypeLike, mode: Mode
) -> tuple[Outputs, Scales, Products]:
    """Returns outputs in `dtype`, the weights' scales, and the products, those in INT8 unscaled."""
    products: list[Array | int8.Product] = []
    scales = []
    for weight in layers.weights:
        if isinstance(n, int8.RowCodes):
            columns = int8.round_columns(weight, mode.implementation)
            products.append(int8.product(n, columns))
            scales.append(fp8_scale(columns, mode))
        elif isinstance(n, Unrounded):
            x, w = (Operand(side, None, None) for side in (n.values, weight.astype(dtype)))
            products.append(gemm.product(x, w, dtype))
            scales.append(_scale_of(weight, mode))
        else:
            w = as_operand(weight, dtype, mode, "transposed")
            products.append(gemm.product(n, w, dtype))
            scales.append(w.scale)
    outputs = []
    for product, bias in zip(products, layers.biases, strict=True):
        y = product.scaled(dtype) if isinstance(product, int8.Product) else product
        outputs.append(y if bias is None else y + jnp.broadcast_to(bias.astype(dtype), y.shape))
    return tuple(outputs), tuple(scales), tuple(products)


def input_gradient(
    layers: Layers, scales: Scales, gradients: Sequence[Operand], dtype: DTypeLike, mode: Mode
) -> Float[Array, "*rows K"]:
    """The gradient of the shared input. On a GPU each GEMM adds the result of the previous one."""
    dn: Array | None = None
    for weight, scale, g in zip(layers.weights, scales, gradients, strict=True):
        w = as_operand(weight, dtype, mode, scale=scale)
        share = gemm.product_transposed(g, w, dtype)
        dn = share if dn is None else share + dn  # XLA fuses the sum into the GEMM on its left
    assert dn is not None
    return dn


def bounded_input_gradient(
    layers: Layers, scale: Array | None, dy: Float[Array, "*rows N"], mode: Mode
) -> tuple[Operand, Float[Array, "*rows K"], Float[Array, "*rows"] | None]:
    """Returns dy as an operand, dy w^T, and bounds of its rows for the fused kernels; else None.

    Bounds set the scales of the gradients of an activation's inputs, which saves a pass over these.
    A bound is up to 2^8 times too large. The normal codes of E5M2 span 2^30, which leaves enough;
    those of E4M3 span 2^15, which does not.
    """
    bounds = mode.fused_block is not None and mode.precision.backward == E5M2
    if scale is None or mode.format is None or not bounds:
        g = gradient_operand(dy, mode)
        return g, input_gradient(layers, (scale,), (g,), dy.dtype, mode), None
    g = gradient_operand(dy, mode, lengths=True)
    w = as_operand(layers.weights[0], dy.dtype, mode, scale=scale, lengths=True)
    return g, gemm.product_transposed(g, w, dy.dtype), gemm.bound_of_product_transposed(g, w)


def parameter_gradients(
    n: Operand,
    layers: Layers,
    operands: Sequence[Operand],
    gradients: Callable[[], Sequence[Float[Array, "*rows N"]]],
) -> Layers:
    """The gradients of weights and biases, in the dtypes of these.

    Args:
        n: the input of the layers.
        layers: the parameters.
        operands: the gradients of the layers' outputs.
        gradients: a function that returns the same as arrays; called only if there is a bias.
    """
    weights = tuple(
        gemm.outer_product(n, g, weight.dtype)
        for weight, g in zip(layers.weights, operands, strict=True)
    )
    if all(bias is None for bias in layers.biases):
        return Layers(weights, layers.biases)

    def gradient(bias: Array, dy: Array) -> Array:
        rows = tuple(range(dy.ndim - 1))
        return jnp.sum(dy.astype(jnp.float32), axis=rows).astype(bias.dtype)

    biases = (
        None if bias is None else gradient(bias, dy)
        for bias, dy in zip(layers.biases, gradients(), strict=True)
    )
    return Layers(weights, tuple(biases))


def as_layers(
    name: str,
    columns: int,
    weights: Array | Sequence[Array],
    biases: Array | Sequence[Array | None] | None,
) -> Layers:
    """One layer or several, checked: each weight is [columns, N] and each bias [N]."""
    given: Any = biases
    if not isinstance(weights, Sequence):
        weights, given = (weights,), (biases,)
    elif biases is None:
        given = (None,) * len(weights)
    if not isinstance(given, Sequence) or len(given) != len(weights):
        raise ValueError(f"{name} takes one bias per weight, None for a layer without one.")
    for weight, bias in zip(weights, given, strict=True):
        require_real(name, weight)
        if weight.ndim != 2 or weight.shape[0] != columns:
            raise ValueError(
                f"{name} got an input with {columns} columns and a weight of shape "
                f"{weight.shape}. A weight is [{columns}, N]: inputs times outputs."
            )
        if bias is None:
            continue
        require_real(name, bias)
        if bias.shape != weight.shape[1:]:
            raise ValueError(
                f"{name} got a bias of shape {bias.shape} for a weight of shape {weight.shape}: "
                f"it should be {weight.shape[1:]}."
            )
    return Layers(tuple(weights), tuple(given))
