"""Sharpness: how much a token's loss can grow if its logits change a little, in closed form.

    phi = 100 (max f(x + z) - f(x)) / (1 + f(x)),    |z_i| <= epsilon (|x_i| + 1)

f is the cross-entropy of the logits x with a label (Keskar et al., arXiv 1609.04836; for logits,
Lee et al., arXiv 2405.18710). f decreases in the label's logit and increases in every other one,
whatever the rest is. So at its maximum the label's logit is as small as allowed, all others are
as large as allowed, and no search is needed. With d = epsilon (|x| + 1):

    max f - f = log(1 + sum over i != label of  p_i (exp(d_i + d_label) - 1)),    p = softmax(x)

This is the difference of two log-sum-exps, written as a sum of positive terms, so that nothing
cancels.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

EPSILON = 5e-4


def sharpness(
    logits: Float[Array, "*tokens V"], labels: Int[Array, "*tokens"], *, epsilon: float = EPSILON
) -> Float[Array, "*tokens"]:
    """Returns the sharpness of each token's loss, in FP32.

    Args:
        logits: the logits of each token.
        labels: the label of each token.
        epsilon: by how much logits may change, relative to |x| + 1.
    """
    x = logits.astype(jnp.float32)
    change = epsilon * (jnp.abs(x) + 1)
    is_label = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1) == labels[..., None]
    log_p = jax.nn.log_softmax(x)
    of_label = jnp.sum(jnp.where(is_label, change, 0.0), axis=-1, keepdims=True)
    terms = jnp.exp(log_p) * jnp.expm1(change + of_label)
    grown = jnp.sum(jnp.where(is_label, 0.0, terms), axis=-1)
    loss = -jnp.sum(jnp.where(is_label, log_p, 0.0), axis=-1)
    return 100 * jnp.log1p(grown) / (1 + loss)
