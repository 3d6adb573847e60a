"""The norm before a linear layer: what it saves, and how the backward pass recomputes it.

    forward     x -> saved x (blocks), statistics, scale -> n = norm(saved x) in FP8 or INT8
    backward    saved x, statistics, scale -> n in FP8, transposed;  dn -> dx

Without a norm, n is the saved x. With `Precision.exact_forward` the forward pass normalizes x
itself, and both passes use the statistics of x. Each function is `jnp`, or a kernel if
`mode.fused_block` is set.
"""

from typing import NamedTuple

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
from coat_jax.ops.saved.array import SavedArray, restore, round_and_save
from coat_jax.ops.saved.projection import Input, Mode, fp8_scale, recompute_input
from coat_jax.precision import Precision


class SavedNorm(NamedTuple):
    """The input of a norm as it is saved, and what else the backward pass needs."""

    x: SavedArray
    stats: Stats | None  # None without a norm
    scale: Float[Array, ""] | None  # of n in FP8; None if n is not rounded


def save_norm(x: Float[Array, "B S D"], norm: Norm | None, mode: Mode) -> tuple[SavedNorm, Input]:
    """Returns what is saved of `x`, and norm(x) as the input of products."""
    precision = mode.precision
    scale = None
    stats: Stats | None = None
    if norm is not None and mode.format is not None:
        bound = bound_of_norm(norm, x.shape[-1], _rounding(precision))
        scale = gemm.tensor_scale(bound, mode.format)
        if mode.fused_block is not None:
            blocks, stats, codes, largest = norm_forward(
                x,
                norm,
                scale,
                precision.forward,
                mode.fused_block,
                exact=precision.exact_forward,
                stochastic=precision.saves_stochastically,
                in_int8=mode.precision.int8_forward,
            )
            saved_norm = SavedNorm(blocks, stats, scale)
            if largest is None:
                return saved_norm, Operand(codes, None, scale)
            return saved_norm, int8.RowCodes(codes, largest)
    saved, n = round_and_save(x, precision)
    if norm is not None:
        stats = statistics(n, norm)
        n = normalize(n, stats, norm)
    if mode.format is None:
        return SavedNorm(saved, stats, None), Operand(n.astype(x.dtype), None, None)
    if mode.precision.int8_forward:
        rows = int8.round_rows(n)
        return SavedNorm(saved, stats, fp8_scale(rows, mode) if scale is None else scale), rows
    if scale is None:
        operand = gemm.operand(n, mode.format, "straight", mode.implementation)
    else:
        operand = gemm.scaled(n, scale, mode.format, "straight", mode.implementation)
    return SavedNorm(saved, stats, operand.scale), operand


def recompute_norm(saved: SavedNorm, norm: Norm | None, mode: Mode, dtype: DTypeLike) -> Operand:
    """norm(x) from the saved x, as the operand for the gradients of the weights after it."""
    x, stats, scale = saved
    size = mode.fused_block
    if (
        isinstance(x, Blocks)
        and norm is not None
        and stats is not None
        and scale is not None
        and size is not None
    ):
        codes = norm_cast(x, stats, norm, scale, size, stream=mode.stream("inputs"))
        return Operand(None, codes, scale)
    values = restore(x, jnp.float32, mode.precision.block)
    if norm is not None and stats is not None:
        values = normalize(values, stats, norm)
    return recompute_input(values, scale, dtype, mode)


def norm_gradient(
    saved: SavedNorm,
    norm: Norm | None,
    dn: Float[Array, "B S D"],
    residual: Float[Array, "B S D"] | None,
    mode: Mode,
) -> tuple[Float[Array, "B S D"], Norm | None]:
    """The gradients of x and of the norm's parameters.

    Args:
        saved: from `save_norm`.
        norm: the norm, or None.
        dn: the gradient of norm(x).
        residual: the gradient that x gets from the residual stream, which is added; or None.
        mode: how to compute.
    """
    x, stats, _ = saved
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


def _rounding(precision: Precision) -> float:
    """The largest relative rounding error of the saved x, if the statistics are not its own."""
    if precision.block is None or not precision.exact_forward:
        return 0.0
    to_nearest = 2.0 ** -(format_of(precision.forward).mantissa_bits + 1)
    return float(2 * to_nearest if precision.saves_stochastically else to_nearest)
