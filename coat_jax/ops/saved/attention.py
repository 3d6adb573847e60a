"""Attention between the projections: what it keeps, and its gradients.

    forward     q, k, v -> kept (blocks) -> o, kept likewise, and the log-sum-exp of each row
    backward    kept, do -> dq, dk, dv

On a GPU attention is cuDNN's, in 16 bits, and its backward pass begins with o and the
log-sum-exp. XLA's, elsewhere, computes them again.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from coat_jax.ops.saved.array import Kept, keep, restore
from coat_jax.precision import Precision

Backend = Literal["cudnn", "xla"]
Pull = Callable[[Array], tuple[Array, Array, Array]]


class Attention(NamedTuple):
    """Which attention, and what of it is kept in FP8."""

    causal: bool
    window: int | None
    scale: float
    precision: Precision
    backend: Backend


class Attended(NamedTuple):
    """What attention keeps: its inputs, its output, and cuDNN's log-sum-exp."""

    inputs: tuple[Kept, Kept, Kept]
    output: Kept
    log_sums: Float[Array, "B N S"] | None


def attended(
    settings: Attention,
    q: Float[Array, "B S N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segments: Int[Array, "B S"] | None,
) -> tuple[Float[Array, "B S N H"], Attended]:
    """o, and what to keep.

    With `Precision.exact_forward`, too, o is that of q, k and v as they are kept. The backward pass
    computes the softmax anew, from these and from the log-sum-exp: were that the log-sum-exp of
    other scores, rows of the softmax would not add up to 1, and gradients would be worse.
    """
    block, dtype = settings.precision.attention_block, settings.precision.forward
    query, key, value = (keep(x, dtype, block) for x in (q, k, v))
    values = [restore(x, q.dtype, block) for x in (query, key, value)]
    attend = _attend(settings, segments)
    log_sums = None
    if settings.backend == "cudnn":
        o, pull = jax.vjp(attend, *values)
        _, at = _places(attend, values)
        log_sums = None if at is None else jax.tree.leaves(pull)[at]
    else:
        o = attend(*values)
    return o, Attended((query, key, value), keep(o, dtype, block), log_sums)


def attended_again(
    settings: Attention, kept: Attended, segments: Int[Array, "B S"] | None, dtype: DTypeLike
) -> tuple[Float[Array, "B S N H"], Pull]:
    """o as it was kept, and the function from its gradient to those of q, k and v."""
    block = settings.precision.attention_block
    values = [restore(x, dtype, block) for x in kept.inputs]
    o = restore(kept.output, dtype, block)
    attend = _attend(settings, segments)
    _, pull = jax.vjp(attend, *values)
    if kept.log_sums is not None:
        # What the pullback holds of the forward pass is what was kept: nobody asks for that
        # pass any more, and XLA removes it.
        leaves, structure = jax.tree.flatten(pull)
        for place, array in zip(_places(attend, values), (o, kept.log_sums), strict=True):
            if place is not None:
                leaves[place] = array
        pull = jax.tree.unflatten(structure, leaves)
    return o, pull


def _attend(settings: Attention, segments: Array | None) -> Callable[..., Array]:
    """Attention as a function of q, k and v."""
    mask: Bool[Array, "B 1 S S"] | None = None
    if segments is not None:
        mask = (segments[:, :, None] == segments[:, None, :])[:, None]
    return partial(_evenly if settings.backend == "cudnn" else _under, settings, mask)


def _under(
    settings: Attention, mask: Bool[Array, "B 1 S T"] | None, q: Array, k: Array, v: Array
) -> Array:
    """Attention under a mask, besides that of `settings`."""
    return dot_product_attention(
        q,
        k,
        v,
        mask=mask,
        scale=settings.scale,
        is_causal=settings.causal,
        local_window_size=None if settings.window is None else (settings.window - 1, 0),
        implementation=settings.backend,
    )


def dot_product_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    **settings: Any,
) -> Float[Array, "B S N H"]:
    """`jax.nn.dot_product_attention`, also of FP16 on a CPU, where XLA has no such products."""
    if q.dtype != jnp.float16 or jax.default_backend() != "cpu":
        return jax.nn.dot_product_attention(q, k, v, **settings)
    wide = (x.astype(jnp.float32) for x in (q, k, v))
    return jax.nn.dot_product_attention(*wide, **settings).astype(q.dtype)


def _evenly(
    settings: Attention,
    mask: Bool[Array, "B 1 S T"] | None,
    q: Float[Array, "B S N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
) -> Float[Array, "B S N H"]:
    """cuDNN's attention, which has no gradients of an odd length: with one more query or key.

    No query but the added one sees the added key: it is the last, or masked.
    """
    (batch, s), t = q.shape[:2], k.shape[1]
    queries, keys = s % 2, t % 2  # how many are added
    if not queries and not keys:
        return _under(settings, mask, q, k, v)
    if mask is None and keys and not (settings.causal and s <= t):
        mask = jnp.ones((batch, 1, s, t), bool)
    if mask is not None:
        mask = jnp.pad(mask, [(0, 0), (0, 0), (0, queries), (0, keys)])
        if queries:  # The softmax of a row without any key would be NaN.
            mask = mask.at[:, :, s, min(s, t + keys - 1)].set(True)
    q = jnp.pad(q, [(0, 0), (0, queries), (0, 0), (0, 0)])
    k, v = (jnp.pad(x, [(0, 0), (0, keys), (0, 0), (0, 0)]) for x in (k, v))
    return _under(settings, mask, q, k, v)[:, :s]


def _places(attend: Callable[..., Array], values: list[Array]) -> tuple[int | None, int | None]:
    """Where the pullback of cuDNN's attention holds o and the log-sum-exp; None if it does not."""

    def everything(*values: Array) -> list[Array]:
        o, pull = jax.vjp(attend, *values)
        return [o, *jax.tree.leaves(pull)]

    o, *leaves = jax.make_jaxpr(everything)(*values).jaxpr.outvars
    batch, length, heads, _ = values[0].shape
    shapes = [leaf.aval.shape for leaf in leaves]
    row = (batch, heads, length)
    return leaves.index(o) if o in leaves else None, shapes.index(row) if row in shapes else None
