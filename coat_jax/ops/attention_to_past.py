"""Attention of one new token in each sequence to all tokens before it.

    o = softmax(q k^T / sqrt(H)) v        over the slots that are visible

Keys and values of all slots have been computed before. This is for generation: one row of scores
per head is small, so nothing is fused, and without a backward pass nothing is saved.
"""

import jax
from jaxtyping import Array, Bool, Float

from coat_jax.ops.attention import dot_product_attention, require_heads


def attention_to_past(
    q: Float[Array, "B 1 N H"],
    keys: Float[Array, "B T K H"],
    values: Float[Array, "B T K H"],
    visible: Bool[Array, "B T"],
    *,
    scale: float | None = None,
) -> Float[Array, "B 1 N H"]:
    """Scaled dot-product attention of the newest token.

    Args:
        q: queries of N heads.
        keys: of K heads, where K divides N: each serves N / K query heads.
        values: of K heads.
        visible: the slots that the token attends to; at least one in each sequence.
        scale: of the scores, 1 / sqrt(H) by default.
    """
    require_heads("attention_to_past", q, keys, values)
    slots = jax.typeof(visible).shape
    if q.shape[1] != 1 or slots != keys.shape[:2]:
        raise ValueError(
            "attention_to_past takes q [B, 1, N, H] and visible [B, T] for keys [B, T, K, H], not "
            f"{q.shape}, {slots} and {keys.shape}."
        )
    mask = visible[:, None, None, :]
    return dot_product_attention(q, keys, values, mask=mask, scale=scale, implementation="xla")
