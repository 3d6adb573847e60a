"""Clipping for a step whose backward pass updates a model stage by stage, and frees gradients.

See `coat_jax.optax.step_by_stages`. Gradients are clipped by the norm of the step before, which is
part of the state:

    scale = min(1, clip_norm / norm of the step before)
    scale = min(1, clip_norm / (sqrt(stages) norm of this stage))     where that is not known
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from coat_jax.optax import InPlaceOptimizer
from coat_jax.optax.clipping import clip_scale


class ReleaseState(NamedTuple):
    """The state of an optimizer, and the norm of the gradients that it was updated with last."""

    gradient_norm: Float[Array, ""]
    inner: Any


def with_gradient_norm(optimizer: InPlaceOptimizer) -> InPlaceOptimizer:
    """`optimizer` with a `ReleaseState` around its state, whose norm its `step` does not change.

    Only when all stages have been stepped is the norm of their gradients known.
    """

    def init(params: optax.Params) -> ReleaseState:
        return ReleaseState(jnp.full([], jnp.nan), optimizer.init(params))

    def step(
        params: optax.Params, grads: optax.Updates, state: ReleaseState, **options: Any
    ) -> tuple[optax.Params, ReleaseState]:
        params, inner = optimizer.step(params, grads, state.inner, **options)
        return params, state._replace(inner=inner)

    return InPlaceOptimizer(init, step)


def scale_of_stage(
    clip_norm: float | None,
    norm_before: Float[Array, ""],
    stages: int,
    norm_of_stage: Float[Array, ""],
) -> float | Float[Array, ""]:
    """Returns the factor that clips the gradients of a stage.

    If the norm of the step before is not known (in the first step) or not finite, each stage is
    clipped to an equal share of `clip_norm`, so that together they do not exceed `clip_norm`.
    """
    if clip_norm is None:
        return 1.0
    at_most = jnp.where(jnp.isfinite(norm_before), norm_before, norm_of_stage * math.sqrt(stages))
    return clip_scale(at_most, clip_norm)
