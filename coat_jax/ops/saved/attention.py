"""Attention between its projections: what it saves, and its gradients.

    forward     q, k, v -> saved q, k, v (blocks) -> o, log-sum-exp of each row -> saved o (blocks)
    backward    saved q, k, v, o and log-sum-exp, do -> dq, dk, dv

On a GPU cuDNN computes attention in 16 bits, and its backward pass needs o and the log-sum-exp.
Elsewhere XLA computes it, and recomputes them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from coat_jax.ops.saved.array import SavedArray, restore, save_array
from coat_jax.precision import Precision

Backend = Literal["cudnn", "xla"]
Pull = Callable[[Array], tuple[Array, Array, Array]]


class AttentionSettings(NamedTuple):
    """The kind of attention, how it is computed, and what it saves in FP8."""

    causal: bool
    window: int | None
    scale: float
    precision: Precision
    backend: Backend


class SavedAttention(NamedTuple):
    """What attention saves: its inputs, its output, and cuDNN's log-sum-exp."""

    inputs: tuple[SavedArray, SavedArray, SavedArray]
    output: SavedArray
    log_sum_exp: Float[Array, "B N S"] | None


def save_attention(
    settings: AttentionSettings,
    q: Float[Array, "B S N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segments: Int[Array, "B S"] | None,
) -> tuple[Float[Array, "B S N H"], SavedAttention]:
    """Returns o, and what is saved.

    o is computed from the saved q, k and v, even with `Precision.exact_forward`: the backward pass
    recomputes the softmax from these and from the log-sum-exp. With the log-sum-exp of unrounded
    scores, the rows of that softmax would not add up to 1, and gradients would be worse.
    """
    block, dtype = settings.precision.attention_block, settings.precision.forward
    query, key, value = (save_array(x, dtype, block) for x in (q, k, v))
    values = [restore(x, q.dtype, block) for x in (query, key, value)]
    attend = _attention_of(settings, segments)
    log_sum_exp = None
    if settings.backend == "cudnn":
        o, pull = jax.vjp(attend, *values)
        _, at = _pullback_indices(attend, values)
        log_sum_exp = None if at is None else jax.tree.leaves(pull)[at]
    else:
        o = attend(*values)
    stochastic = settings.precision.saves_stochastically
    output = save_array(o, dtype, block, stochastic=stochastic)
    return o, SavedAttention((query, key, value), output, log_sum_exp)


def recompute_attention(
    settings: AttentionSettings,
    saved: SavedAttention,
    segments: Int[Array, "B S"] | None,
    dtype: DTypeLike,
) -> tuple[Float[Array, "B S N H"], Pull]:
    """The saved o, and the function from its gradient to the gradients of q, k and v."""
    block = settings.precision.attention_block
    values = [restore(x, dtype, block) for x in saved.inputs]
    o = restore(saved.output, dtype, block)
    attend = _attention_of(settings, segments)
    _, pull = jax.vjp(attend, *values)
    if saved.log_sum_exp is not None:
        # The saved o and log-sum-exp replace those in the pullback. Nothing else then needs the
        # forward pass that this function traced, so XLA removes it.
        leaves, structure = jax.tree.flatten(pull)
        for index, array in zip(
            _pullback_indices(attend, values), (o, saved.log_sum_exp), strict=True
        ):
            if index is not None:
                leaves[index] = array
        pull = jax.tree.unflatten(structure, leaves)
    return o, pull


def _attention_of(settings: AttentionSettings, segments: Array | None) -> Callable[..., Array]:
    """Attention as a function of q, k and v."""
    mask: Bool[Array, "B 1 S S"] | None = None
    if segments is not None:
        mask = (segments[:, :, None] == segments[:, None, :])[:, None]
    attend = partial(
        dot_product_attention,
        scale=settings.scale,
        is_causal=settings.causal,
        local_window_size=None if settings.window is None else (settings.window - 1, 0),
        implementation=settings.backend,
    )
    if settings.backend == "cudnn":
        return partial(_attend_padded, attend, mask, settings.causal)
    return partial(attend, mask=mask)


def dot_product_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    **settings: Any,
) -> Float[Array, "B S N H"]:
    """`jax.nn.dot_product_attention`; on a CPU, which lacks FP16 products, FP16 runs in FP32."""
    if q.dtype != jnp.float16 or jax.default_backend() != "cpu":
        return jax.nn.dot_product_attention(q, k, v, **settings)
    wide = (x.astype(jnp.float32) for x in (q, k, v))
    return jax.nn.dot_product_attention(*wide, **settings).astype(q.dtype)


def _attend_padded(
    attend: Callable[..., Array],
    mask: Bool[Array, "B 1 S T"] | None,
    causal: bool,
    q: Float[Array, "B S N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
) -> Float[Array, "B S N H"]:
    """Pads cuDNN's attention to even lengths, since it has no gradients for odd ones.

    The causal mask or `mask` hides the added key from all queries but the added one.
    """
    (batch, s), t = q.shape[:2], k.shape[1]
    queries, keys = s % 2, t % 2  # how many are added
    if not queries and not keys:
        return attend(q, k, v, mask=mask)
    if mask is None and keys and not (causal and s <= t):
        mask = jnp.ones((batch, 1, s, t), bool)
    if mask is not None:
        mask = jnp.pad(mask, [(0, 0), (0, 0), (0, queries), (0, keys)])
        if queries:  # The softmax of a row without any key would be NaN.
            mask = mask.at[:, :, s, min(s, t + keys - 1)].set(True)
    q = jnp.pad(q, [(0, 0), (0, queries), (0, 0), (0, 0)])
    k, v = (jnp.pad(x, [(0, 0), (0, keys), (0, 0), (0, 0)]) for x in (k, v))
    return attend(q, k, v, mask=mask)[:, :s]


def _pullback_indices(
    attend: Callable[..., Array], values: list[Array]
) -> tuple[int | None, int | None]:
    """The indices of o and the log-sum-exp among the leaves of cuDNN's pullback, None if absent."""

    def everything(*values: Array) -> list[Array]:
        o, pull = jax.vjp(attend, *values)
        return [o, *jax.tree.leaves(pull)]

    o, *leaves = jax.make_jaxpr(everything)(*values).jaxpr.outvars
    batch, length, heads, _ = values[0].shape
    shapes = [leaf.aval.shape for leaf in leaves]
    row = (batch, heads, length)
    return leaves.index(o) if o in leaves else None, shapes.index(row) if row in shapes else None
