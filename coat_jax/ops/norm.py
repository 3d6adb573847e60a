"""A norm: by itself, and before linear layers, in the ops of which it is a part.

    norm(x)             saves x in FP8 blocks, or as it is, and one or two numbers per row

    save_norm           x -> saved x (blocks), statistics, scale -> n = norm(x) in FP8 or INT8
    recompute_norm      saved x, statistics, scale -> n in FP8, transposed
    norm_gradient       saved x, statistics, dn -> dx

With `Precision.exact_forward` the forward pass normalizes x itself, and both passes use the
statistics of x; without it, both normalize the saved x. Without a norm, n is that x. The last three
functions are `jnp`, or a kernel if `mode.fused_block` is set.
"""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax.kernels import gemm, int8
from coat_jax.kernels.gemm import Operand
from coat_jax.kernels.norm import (
    Norm,
    Stats,
    bound_of_norm,
    norm_backward,
    norm_cast,
    norm_forward,
    normalize,
    normalize_backward,
    statistics,
)
from coat_jax.numerics.blocks import Blocks
from coat_jax.numerics.formats import format_of
from coat_jax.ops import recording
from coat_jax.ops.checks import require_norm, require_real
from coat_jax.ops.definition import SavedArray, define_op, like_first, restore, save_inputs
from coat_jax.ops.projection import (
    Input,
    Mode,
    Unrounded,
    fp8_scale,
    quantize_input,
    recompute_input,
)
from coat_jax.precision import COAT, Precision, precision_of


def norm(
    x: Float[Array, "*rows D"], norm: Norm, *, precision: Precision | str = COAT
) -> Float[Array, "*rows D"]:
    """RMSNorm or LayerNorm of the last axis, in the dtype of `x`.

    Args:
        x: the input, of any leading shape.
        norm: its parameters, and how it is computed.
        precision: only its `block`, `forward`, `exact_forward` and `stochastic` matter here.
    """
    require_real("norm", x, least_rank=1)
    require_norm("norm", x.shape[-1], norm)
    return _norm(Mode(precision_of(precision), "xla"), (), x, norm)


def _forward(mode: Mode, x: Array, norm: Norm) -> Any:
    precision = mode.precision
    (saved,), (values,) = save_inputs((x,), precision)
    stats = statistics(values, norm)
    of_block = precision.block, precision.forward
    record = partial(recording.blocks, ("saved",), (x,), (saved,), *of_block)
    return normalize(values, stats, norm).astype(x.dtype), (saved, stats, norm), record


def _backward(mode: Mode, saved: SavedArray, stats: Stats, norm: Norm, dy: Array) -> Any:
    values = restore(saved, jnp.float32, mode.precision.block)
    dx, d_norm = normalize_backward(values, stats, norm, dy)
    return (dx.astype(dy.dtype), d_norm), dict


_norm = define_op("norm", _forward, _backward, blocks=("saved",), specs=like_first)


class SavedNorm(NamedTuple):
    """The input of a norm as it is saved, and what else the backward pass needs."""

    x: SavedArray
    norm: Norm | None
    stats: Stats | None  # None without a norm
    scale: Float[Array, ""] | None  # of n in FP8; None if n is not rounded


def save_norm(x: Float[Array, "B S D"], norm: Norm | None, mode: Mode) -> tuple[SavedNorm, Input]:
    """Returns what is saved of `x`, and norm(x) as the input of products."""
    precision = mode.precision
    scale = None
    stats: Stats | None = None
    if norm is not None and mode.format is not None:
        rounding = 0.0  # the largest relative error of the saved x, if statistics are not its own
        if precision.block is not None and precision.exact_forward:
            bits = format_of(precision.forward).mantissa_bits
            rounding = 2.0 ** -(bits if precision.saves_stochastically else bits + 1)
        bound = bound_of_norm(norm, x.shape[-1], rounding)
        scale = gemm.tensor_scale(bound, mode.format)
        if mode.fused_block is not None:
            blocks, stats, n, largest = norm_forward(
                x,
                norm,
                scale,
                precision.forward,
                mode.fused_block,
                exact=precision.exact_forward,
                stochastic=precision.saves_stochastically,
                products=precision.forward_products,
            )
            saved_norm = SavedNorm(blocks, norm, stats, scale)
            if largest is not None:
                return saved_norm, int8.RowCodes(n, largest)
            if precision.forward_products == "bf16":
                return saved_norm, Unrounded(n, scale)
            return saved_norm, Operand(n, None, scale)
    (saved,), (n,) = save_inputs((x,), precision)
    if norm is not None:
        stats = statistics(n, norm)
        n = normalize(n, stats, norm)
    if mode.format is None:
        return SavedNorm(saved, norm, stats, None), Operand(n.astype(x.dtype), None, None)
    if precision.forward_products != "fp8":
        in_int8 = precision.forward_products == "int8"
        used = int8.round_rows(n) if in_int8 else quantize_input(n, x.dtype, mode)
        scale = fp8_scale(used, mode) if scale is None else scale
        return SavedNorm(saved, norm, stats, scale), used
    operand = gemm.operand(n, mode.format, "straight", mode.implementation, scale=scale)
    return SavedNorm(saved, norm, stats, operand.scale), operand


def recompute_norm(saved: SavedNorm, mode: Mode, dtype: DTypeLike) -> Operand:
    """norm(x) from the saved x, as the operand for the gradients of the weights after it."""
    x, norm, stats, scale = saved
    if norm is None or stats is None:
        return recompute_input(restore(x, jnp.float32, mode.precision.block), scale, dtype, mode)
    if isinstance(x, Blocks) and scale is not None and mode.fused_block is not None:
        stream = mode.stream("inputs")
        codes = norm_cast(x, stats, norm, scale, mode.fused_block, stream=stream)
        return Operand(None, codes, scale)
    values = normalize(restore(x, jnp.float32, mode.precision.block), stats, norm)
    return recompute_input(values, scale, dtype, mode)


def norm_gradient(
    saved: SavedNorm,
    dn: Float[Array, "B S D"],
    residual: Float[Array, "B S D"] | None,
    mode: Mode,
) -> tuple[Float[Array, "B S D"], Norm | None]:
    """The gradients of x and of the norm's parameters.

    Args:
        saved: from `save_norm`.
        dn: the gradient of norm(x).
        residual: the gradient that x gets from the residual stream, which is added; or None.
        mode: how to compute.
    """
    x, norm, stats, _ = saved
    if norm is None or stats is None:
        d_norm, dx = None, dn.astype(jnp.float32)
    elif mode.fused_block is not None and isinstance(x, Blocks):
        return norm_backward(x, stats, norm, dn, residual, mode.fused_block)
    else:
        values = restore(x, jnp.float32, mode.precision.block)
        dx, d_norm = normalize_backward(values, stats, norm, dn.astype(jnp.float32))
    if residual is not None:
        dx = dx + residual.astype(jnp.float32)
    return dx.astype(dn.dtype), d_norm
