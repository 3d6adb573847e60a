"""Clipping by the global norm of all gradients.

    norm = sqrt(sum over all leaves of g^2)          summed in FP32 whatever the dtype of g

`optax.clip_by_global_norm` sums BF16 gradients in BF16, with an error of a percent and more.
"""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from coat_jax.optax.arguments import require_numbers


def global_norm(grads: optax.Updates) -> Float[Array, ""]:
    """The norm of all gradients together, in FP32."""
    total = jnp.zeros([], jnp.float32)
    for g in jax.tree.leaves(grads):
        magnitude = jnp.abs(g) if jnp.iscomplexobj(g) else jnp.asarray(g)
        total += jnp.sum(jnp.square(magnitude.astype(jnp.float32)))
    return jnp.sqrt(total)


def global_norm_scale(grads: optax.Updates, max_norm: float | Float[Array, ""]) -> Float[Array, ""]:
    """The factor that clips gradients to a global norm, for `grad_scale` of a fused step.

    Args:
        grads: the gradients, in any dtypes.
        max_norm: the largest norm of the gradients times the factor, above zero. To train
            without clipping, leave `grad_scale` out.
    """
    require_numbers(max_norm=max_norm)
    return clip_scale(global_norm(grads), max_norm).astype(jnp.float32)


def clip_scale(norm: Float[Array, ""], max_norm: float | Float[Array, ""]) -> Float[Array, ""]:
    """The factor that brings gradients of this norm to at most `max_norm`."""
    return jnp.where(norm <= max_norm, 1.0, max_norm / norm)
