"""The norm before a linear layer: from the residual stream to the operand of a product, and back.

    forward     x -> kept (blocks), statistics, scale -> n = norm(kept) in FP8, straight
    backward    kept, statistics, scale -> n in FP8, transposed;  dn -> dx

Without a norm, n is what was kept of x. With `Precision.exact_forward` the forward pass takes x
itself in the place of what was kept; the statistics are then those of x, also in the backward pass.
Each function is jnp, or a kernel where `mode.fused_block`.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax.kernels import gemm
from coat_jax.kernels.gemm import Operand
from coat_jax.kernels.norm import Norm, Stats, bound, normalize, normalize_backward, statistics
from coat_jax.kernels.norm_fused import norm_backward, norm_cast, norm_forward
from coat_jax.numerics.blocks import Blocks
from coat_jax.numerics.formats import format_of
from coat_jax.ops.saved.array import Kept, keep_rows, restore
from coat_jax.ops.saved.projection import Mode, operand_again
from coat_jax.precision import Precision


class Normed(NamedTuple):
    """What is kept of a norm's input."""

    kept: Kept
    stats: Stats | None  # None without a norm
    scale: Float[Array, ""] | None  # of the product's operand, where that is FP8


def normed(x: Float[Array, "B S D"], norm: Norm | None, mode: Mode) -> tuple[Normed, Operand]:
    """What to keep of `x`, and norm(x) as a product takes it."""
    precision = mode.precision
    scale = None
    if norm is not None and mode.format is not None:
        largest = bound(norm, x.shape[-1], _rounding(precision))
        scale = gemm.tensor_scale(largest, mode.format)
        if mode.fused_block is not None:
            exact = precision.exact_forward
            blocks, of_rows, codes = norm_forward(
                x, norm, scale, precision.forward, mode.fused_block, exact=exact
            )
            return Normed(blocks, of_rows, scale), Operand(codes, None, scale)
    (kept, n), stats = keep_rows(x, precision), None
    if norm is not None:
        stats = statistics(n, norm)
        n = normalize(n, stats, norm)
    if mode.format is None:
        return Normed(kept, stats, None), Operand(n.astype(x.dtype), None, None)
    if scale is None:
        operand = gemm.operand(n, mode.format, "straight", mode.implementation)
    else:
        operand = gemm.scaled(n, scale, mode.format, "straight", mode.implementation)
    return Normed(kept, stats, operand.scale), operand


def normed_operand(result: Normed, norm: Norm | None, mode: Mode, dtype: DTypeLike) -> Operand:
    """norm(x) again, from what was kept, for the gradient of the weights after it."""
    kept, stats, scale = result
    size = mode.fused_block
    if (
        isinstance(kept, Blocks)
        and norm is not None
        and stats is not None
        and scale is not None
        and size is not None
    ):
        return Operand(None, norm_cast(kept, stats, norm, scale, size), scale)
    return operand_again(_values(result, norm, mode), scale, dtype, mode, "transposed")


def normed_gradient(
    result: Normed,
    norm: Norm | None,
    dn: Float[Array, "B S D"],
    residual: Float[Array, "B S D"] | None,
    mode: Mode,
) -> tuple[Float[Array, "B S D"], Norm | None]:
    """The gradients of x, where the residual's is added, and of what the norm learns.

    Args:
        result: what was kept.
        norm: the norm, or None.
        dn: the gradient of norm(x).
        residual: the gradient that reaches x beside the norm, or None.
        mode: how to compute.
    """
    kept, stats, _ = result
    if norm is None or stats is None:
        d_norm, dx = None, dn.astype(jnp.float32)
    elif mode.fused_block is not None and isinstance(kept, Blocks):
        return norm_backward(kept, stats, norm, dn, residual, mode.fused_block)
    else:
        values = restore(kept, jnp.float32, mode.precision.block)
        dx, d_norm = normalize_backward(values, stats, norm, dn.astype(jnp.float32))
    if residual is not None:
        dx = dx + residual.astype(jnp.float32)
    return dx.astype(dn.dtype), d_norm


def _rounding(precision: Precision) -> float:
    """How much larger than x what was kept may be, where the statistics are those of x."""
    if precision.block is None or not precision.exact_forward:
        return 0.0
    return float(2.0 ** -(format_of(precision.forward).mantissa_bits + 1))


def _values(result: Normed, norm: Norm | None, mode: Mode) -> Float[Array, "B S D"]:
    """norm(x), in FP32."""
    values = restore(result.kept, jnp.float32, mode.precision.block)
    if norm is None or result.stats is None:
        return values
    return normalize(values, result.stats, norm)
