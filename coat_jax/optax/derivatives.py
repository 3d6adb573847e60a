"""Derivatives through optimizer steps, as in meta-learning: through one step, not through several.

JAX would silently round the derivative of FP8 codes to FP8, and take that of integer codes as zero.
The updates of a step depend on its gradients through FP32 only, so differentiating one step
is exact. Differentiating what a second step reads from the state raises an error.
"""

import jax
import jax.numpy as jnp

from coat_jax.numerics.expansion import Expanded


def refuse_derivatives(stored: Expanded) -> Expanded:
    """Returns `stored`; differentiating it raises an error unless it is an FP32 leaf."""
    return stored if stored.codes.dtype == jnp.float32 else _constant(stored)


@jax.custom_jvp
def _constant(stored: Expanded) -> Expanded:
    return stored


@_constant.defjvp
def _refuse(primals: tuple[Expanded], tangents: tuple[Expanded]) -> tuple[Expanded, Expanded]:
    raise NotImplementedError(
        "Moments stored in 8 bits cannot be differentiated, which happens when a derivative is "
        "taken through more than one step or with respect to the state. Use the uncompressed optax "
        "optimizer there, or storage=coat_jax.Storage(min_size=10**12), which stores all moments "
        "in FP32; for derivatives through the last step alone, apply jax.lax.stop_gradient to "
        "the state."
    )
