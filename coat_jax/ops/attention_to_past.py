"""Attention of one new token in each sequence to all tokens before it.

    o = softmax(q k^T / sqrt(H)) v        over the slots that are visible

Keys and values of all slots have been computed before. This is for generation: one row of scores
per head is small, so nothing is fused, and without a backward pass nothing is saved.
"""

from jaxtyping import Array, Bool, Float

from coat_jax.ops.attention import dot_product_attention, heads_fit
from coat_jax.ops.checks import require_array, require_real


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
    for array in (q, keys, values):
        require_real("attention_to_past", array)
    require_array("attention_to_past", visible)
    fit = heads_fit(q.shape, keys.shape, values.shape) and q.shape[1] == 1
    if not fit or visible.shape != keys.shape[:2]:
        raise ValueError(
            "attention_to_past takes q [B, 1, N, H], keys and values [B, T, K, H] and visible "
            f"[B, T], where K divides N, not {q.shape}, {keys.shape}, {values.shape} and "
            f"{visible.shape}."
        )
    mask = visible[:, None, None, :]
    return dot_product_attention(q, keys, values, mask=mask, scale=scale, implementation="xla")
