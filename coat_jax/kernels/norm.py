"""Normalization of rows, and its gradient.

    rms     y = x / sqrt(mean(x^2) + eps) * scale
    layer   y = (x - mean(x)) / sqrt(var(x) + eps) * scale + shift

`statistics`, `normalize` and `normalize_backward` are the references, in FP32. Besides its input,
the gradient needs `Stats`: one or two numbers per row. `norm_launch` has the kernels, which take
the scale of norm(x) in FP8 from `bound_of_norm`.
"""

import dataclasses
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

NormKind = Literal["rms", "layer"]
KINDS = ("rms", "layer")


class Stats(NamedTuple):
    """Per row: the mean and 1 / standard deviation; for "rms", None and 1 / root mean square."""

    mean: Float[Array, "*rows 1"] | None
    inverse: Float[Array, "*rows 1"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Norm:
    """A norm: its parameters, and how it is computed.

    Attributes:
        scale: [D], or None for a norm without one.
        shift: [D], or None; only of kind "layer".
        kind: "rms" or "layer".
        eps: added to the mean square, or to the variance. Where FP8 products follow, some row of x
            should have an rms above 2^-13 sqrt(eps D): 8e-6 for D = 4096 and the default. If all
            are smaller, norm(x) loses precision, down to zero; `linear(norm(x))` does not.
    """

    scale: Float[Array, " D"] | None = None
    shift: Float[Array, " D"] | None = None
    kind: NormKind = dataclasses.field(default="rms", metadata={"static": True})
    eps: float = dataclasses.field(default=1e-6, metadata={"static": True})

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} must be one of {KINDS}.")
        if not 0 <= self.eps < math.inf:
            raise ValueError(f"eps={self.eps} must be at least 0, and finite.")
        # JAX fills trees with placeholders, even in place of None: only arrays are checked.
        if self.kind == "rms" and hasattr(self.shift, "shape"):
            raise ValueError('A norm of kind "rms" has no shift. Use kind="layer".')


def statistics(x: Float[Array, "*rows D"], norm: Norm) -> Stats:
    """The statistics of each row, in FP32."""
    x = x.astype(jnp.float32)
    mean = None
    if norm.kind == "layer":
        mean = jnp.mean(x, axis=-1, keepdims=True)
        x = x - mean
    return Stats(mean, lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + norm.eps))


def normalize(x: Float[Array, "*rows D"], stats: Stats, norm: Norm) -> Float[Array, "*rows D"]:
    """The norm of `x`, in FP32."""
    y = _centered(x, stats) * stats.inverse
    if norm.scale is not None:
        y = y * jnp.broadcast_to(norm.scale.astype(jnp.float32), y.shape)
    if norm.shift is not None:
        y = y + jnp.broadcast_to(norm.shift.astype(jnp.float32), y.shape)
    return y


def normalize_backward(
    x: Float[Array, "*rows D"], stats: Stats, norm: Norm, dy: Float[Array, "*rows D"]
) -> tuple[Float[Array, "*rows D"], Norm]:
    """The gradients of `x`, in FP32, and of the norm's parameters."""
    dy = dy.astype(jnp.float32)
    unit = _centered(x, stats) * stats.inverse
    rows = tuple(range(x.ndim - 1))
    d_scale = d_shift = None
    if norm.shift is not None:
        d_shift = jnp.sum(dy, axis=rows).astype(norm.shift.dtype)
    d_unit = dy
    if norm.scale is not None:
        d_scale = jnp.sum(dy * unit, axis=rows).astype(norm.scale.dtype)
        d_unit = dy * jnp.broadcast_to(norm.scale.astype(jnp.float32), dy.shape)
    dx = d_unit - unit * jnp.mean(d_unit * unit, axis=-1, keepdims=True)
    if stats.mean is not None:
        dx = dx - jnp.mean(d_unit, axis=-1, keepdims=True)
    return dx * stats.inverse, dataclasses.replace(norm, scale=d_scale, shift=d_shift)


def bound_of_norm(norm: Norm, columns: int, rounding: float = 0.0) -> Float[Array, ""]:
    """An upper bound of |norm(x)|, whatever the row x.

    An element's square is at most the row's sum of squares: |y| <= sqrt(columns) |scale| + |shift|.
    With `rounding`, a layer norm of a row whose mean is far larger than its deviation may exceed
    this. It is then dominated by the rounding error, and saturates.

    Args:
        norm: the norm.
        columns: of a row.
        rounding: the largest relative error of x, if the statistics are of unrounded values.
    """
    largest = (1 + rounding) * jnp.sqrt(jnp.float32(columns))
    if norm.scale is not None:
        largest = largest * jnp.max(jnp.abs(norm.scale)).astype(jnp.float32)
    if norm.shift is not None:
        largest = largest + jnp.max(jnp.abs(norm.shift)).astype(jnp.float32)
    return largest


def _centered(x: Float[Array, "*rows D"], stats: Stats) -> Float[Array, "*rows D"]:
    x = x.astype(jnp.float32)
    return x if stats.mean is None else x - stats.mean
