"""Attention of one new token in each sequence to all tokens before it.

    o = softmax(q k^T / sqrt(H)) v        over the slots that are visible

Keys and values of all slots have been computed before. This is for generation: one row of scores
per head is small, so nothing is fused, and without a backward pass nothing is saved.
"""

from jaxtyping import Array, Bool, Float

from coat_jax.ops.saved.attention import dot_product_attention


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
        values: likewise.
        visible: the slots that the token attends to; at least one in each sequence.
        scale: of the scores, 1 / sqrt(H) by default.
    """
    (batch, new, heads, head_dim), (rows, slots, kv_heads, columns) = q.shape, keys.shape
    fit = (batch, head_dim) == (rows, columns) and kv_heads and heads % kv_heads == 0
    if new != 1 or not fit or values.shape != keys.shape or visible.shape != (batch, slots):
        raise ValueError(
            "attention_to_past takes q [B, 1, N, H], keys and values [B, T, K, H] and visible "
            f"[B, T], where K divides N, not {q.shape}, {keys.shape}, {values.shape} and "
            f"{visible.shape}."
        )
    mask = visible[:, None, None, :]
    return dot_product_attention(q, keys, values, mask=mask, scale=scale, implementation="xla")
