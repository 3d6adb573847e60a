"""Normalization of rows, and its gradient.

    rms     y = x / sqrt(mean(x^2) + eps) * scale
    layer   y = (x - mean(x)) / sqrt(var(x) + eps) * scale + shift

All in FP32. What the gradient needs of the input besides the input itself is `Stats`, one or
two numbers per row.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

Kind = Literal["rms", "layer"]
KINDS = ("rms", "layer")


class Stats(NamedTuple):
    """Per row: the mean (None for "rms") and the reciprocal of the deviation."""

    mean: Float[Array, "*rows 1"] | None
    inverse: Float[Array, "*rows 1"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Norm:
    """A norm: what it learns (None where it learns nothing), and how it is computed."""

    scale: Float[Array, "D"] | None = None
    shift: Float[Array, "D"] | None = None
    kind: Kind = dataclasses.field(default="rms", metadata={"static": True})
    eps: float = dataclasses.field(default=1e-6, metadata={"static": True})

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} must be one of {KINDS}.")
        # JAX fills trees with placeholders, also in the place of None: only arrays are judged.
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
        y = y * norm.scale.astype(jnp.float32)
    if norm.shift is not None:
        y = y + norm.shift.astype(jnp.float32)
    return y


def normalize_backward(
    x: Float[Array, "*rows D"], stats: Stats, norm: Norm, dy: Float[Array, "*rows D"]
) -> tuple[Float[Array, "*rows D"], Norm]:
    """The gradients of `x`, in FP32, and of what the norm learns."""
    dy = dy.astype(jnp.float32)
    unit = _centered(x, stats) * stats.inverse
    rows = tuple(range(x.ndim - 1))
    d_scale = d_shift = None
    if norm.shift is not None:
        d_shift = jnp.sum(dy, axis=rows).astype(norm.shift.dtype)
    d_unit = dy
    if norm.scale is not None:
        d_scale = jnp.sum(dy * unit, axis=rows).astype(norm.scale.dtype)
        d_unit = dy * norm.scale.astype(jnp.float32)
    dx = d_unit - unit * jnp.mean(d_unit * unit, axis=-1, keepdims=True)
    if stats.mean is not None:
        dx = dx - jnp.mean(d_unit, axis=-1, keepdims=True)
    return dx * stats.inverse, dataclasses.replace(norm, scale=d_scale, shift=d_shift)


def bound(norm: Norm, columns: int, rounding: float = 0.0) -> Float[Array, ""]:
    """What no magnitude in the norm of a row exceeds, whatever the row.

    One member has at most all of the row's square sum: |y| <= sqrt(columns) |scale| + |shift|.

    Args:
        norm: the norm.
        columns: of a row.
        rounding: how much larger a value may be than the one that the statistics are of,
            relatively.
    """
    root = (1 + rounding) * jnp.sqrt(jnp.float32(columns))
    for parameter, largest in ((norm.scale, jnp.multiply), (norm.shift, jnp.add)):
        if parameter is not None:
            root = largest(root, jnp.max(jnp.abs(parameter)).astype(jnp.float32))
    return root


def _centered(x: Float[Array, "*rows D"], stats: Stats) -> Float[Array, "*rows D"]:
    x = x.astype(jnp.float32)
    return x if stats.mean is None else x - stats.mean
