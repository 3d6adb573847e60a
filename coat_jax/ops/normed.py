"""The norm before a linear layer: from the residual stream to the operand of a product, and back.

    forward     x -> kept (blocks), statistics, scale -> n = norm(kept) in FP8, straight
    backward    kept, statistics, scale -> n in FP8, transposed;  dn -> dx

Without a norm, n is what was kept of x. Each function is jnp, or a kernel where `mode.fused`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax.blocks import Blocks
from coat_jax.kernels import gemm
from coat_jax.kernels.cast import Layout
from coat_jax.kernels.gemm import Operand
from coat_jax.kernels.norm import Norm, Stats, normalize, normalize_backward, statistics
from coat_jax.kernels.norm_fused import norm_backward, norm_cast, norm_forward
from coat_jax.ops.keep import Kept, keep, restore
from coat_jax.ops.projection import Mode, total


class Normed(NamedTuple):
    """What is kept of a norm's input."""

    kept: Kept
    stats: Stats | None  # None without a norm
    scale: Float[Array, ""] | None  # of the product's operand, where that is FP8


def normed(x: Float[Array, "B S D"], norm: Norm | None, mode: Mode) -> tuple[Normed, Operand]:
    """What to keep of `x`, and norm(x) as a product takes it."""
    precision = mode.precision
    if mode.fused and norm is not None:
        blocks, of_rows, amax = norm_forward(x, norm, precision.forward, precision.block or 1)
        scale = gemm.tensor_scale(jnp.max(amax), precision.forward)
        result = Normed(blocks, of_rows, scale)
        return result, normed_operand(result, norm, mode, x.dtype, "straight")
    kept = keep(x, precision.forward, precision.block)
    n, stats = restore(kept, jnp.float32, precision.block), None
    if norm is not None:
        stats = statistics(n, norm)
        n = normalize(n, stats, norm)
    if mode.format is None:
        return Normed(kept, stats, None), Operand(n.astype(x.dtype), None, None)
    operand = gemm.operand(n, mode.format, "straight", mode.implementation)
    return Normed(kept, stats, operand.scale), operand


def normed_operand(
    result: Normed, norm: Norm | None, mode: Mode, dtype: DTypeLike, layout: Layout = "transposed"
) -> Operand:
    """norm(x) again, from what was kept, for the product that `layout` suits."""
    kept, stats, scale = result
    block = mode.precision.block
    if scale is None or mode.format is None:
        return Operand(_values(result, norm, mode).astype(dtype), None, None)
    if mode.fused and norm is not None and stats is not None and isinstance(kept, Blocks):
        codes = norm_cast(kept, stats, norm, scale, block or 1, layout)
        straight = layout == "straight"
        return Operand(codes if straight else None, None if straight else codes, scale)
    values = _values(result, norm, mode)
    return gemm.scaled(values, scale, mode.format, layout, mode.implementation)


def normed_gradient(
    result: Normed,
    norm: Norm | None,
    shares: Sequence[Float[Array, "B S D"]],
    residual: Float[Array, "B S D"] | None,
    mode: Mode,
    dtype: DTypeLike,
) -> tuple[Float[Array, "B S D"], Norm | None]:
    """The gradients of x, where the residual's is added, and of what the norm learns.

    Args:
        result: what was kept.
        norm: the norm, or None.
        shares: of the gradient of norm(x); their sum is it.
        residual: the gradient that reaches x beside the norm, or None.
        mode: how to compute.
        dtype: of the result.
    """
    kept, stats, _ = result
    block = mode.precision.block
    if norm is None or stats is None:
        d_norm, dx = None, total(shares)
    elif mode.fused and isinstance(kept, Blocks):
        return norm_backward(kept, stats, norm, shares, residual, block or 1, dtype)
    else:
        values = restore(kept, jnp.float32, block)
        dx, d_norm = normalize_backward(values, stats, norm, total(shares))
    if residual is not None:
        dx = dx + residual.astype(jnp.float32)
    return dx.astype(dtype), d_norm


def _values(result: Normed, norm: Norm | None, mode: Mode) -> Float[Array, "B S D"]:
    """norm(x), in FP32."""
    values = restore(result.kept, jnp.float32, mode.precision.block)
    if norm is None or result.stats is None:
        return values
    return normalize(values, result.stats, norm)
