"""A model as stages, for a step whose backward pass updates each one and frees its gradients.

    embedding -> layer 0 -> layer 1 -> ... -> last norm, head and loss

See `coat_jax.optax.step_by_stages`. Gradients are clipped by the norm of the step before, which is
part of the state:

    scale = min(1, clip_norm / norm of the step before)
    scale = min(1, clip_norm / (sqrt(stages) norm of this stage))     where that is not known
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from coat_jax import ops
from coat_jax.models.llama import layer_functions
from coat_jax.optax import FusedOptimizer, Stage
from coat_jax.optax.clipping import clip_scale


class Released(NamedTuple):
    """The state of an optimizer, and the norm of the gradients that it was updated with last."""

    gradient_norm: Float[Array, ""]
    inner: Any


def with_gradient_norm(optimizer: FusedOptimizer) -> FusedOptimizer:
    """`optimizer` whose `init` returns a `Released` state; its `step` takes the inner one."""

    def init(params: optax.Params) -> Released:
        return Released(jnp.full([], jnp.nan), optimizer.init(params))

    return FusedOptimizer(init, optimizer.step)


def scale_of_stage(
    clip_norm: float | None,
    norm_before: Float[Array, ""],
    stages: int,
    norm_of_stage: Float[Array, ""],
) -> float | Float[Array, ""]:
    """The factor that clips the gradients of a stage.

    If the norm of the step before is not known (in the first step) or not finite, each stage is
    clipped to an equal share of `clip_norm`, so that together they do not exceed `clip_norm`.
    """
    if clip_norm is None:
        return 1.0
    at_most = jnp.where(jnp.isfinite(norm_before), norm_before, norm_of_stage * math.sqrt(stages))
    return clip_scale(at_most, clip_norm)


def stages_of(graph: Any, params: Any, microbatch: Any, z_loss: float) -> list[Stage]:
    """The model's stages, from the tokens of a microbatch to its loss.

    Args:
        graph: of the model, whose layers are a list.
        params: of the model.
        microbatch: a `Batch` of arrays [rows, sequence].
        z_loss: as in the config.
    """
    model = nnx.merge(graph, params)
    head = "embed" if model.head is None else "head"
    steps = layer_functions(model.config, model.layers, microbatch.positions, microbatch.segments)

    def embed(of_stage: Any, _: None) -> Array:
        x: Array = with_params(of_stage).embedded(microbatch.tokens)
        return x

    def loss(of_stage: Any, x: Array) -> Array:
        model = with_params(of_stage)
        weight = model.head_weight()
        return ops.cross_entropy(model.norm(x), weight, microbatch.labels, z_loss=z_loss)

    def with_params(of_stage: Any) -> Any:
        return nnx.merge(graph, nnx.State({**params, **_sharded(of_stage)}))

    def only(*names: str) -> Any:
        return lambda params: nnx.State({name: params[name] for name in names if name in params})

    layers = [
        Stage(
            lambda params, i=i: params["layers"][i],  # type: ignore[misc]
            lambda of_stage, x, step=step: step(x, _sharded(of_stage), None),  # type: ignore[misc]
        )
        for i, step in enumerate(steps)
    ]
    return [Stage(only("embed"), embed), *layers, Stage(only("norm", head), loss)]


def _sharded(params: Any) -> Any:
    """`params`, constrained to their sharding, so that gradients are reduced to shards at once."""
    if jax.sharding.get_abstract_mesh().empty:
        return params
    return lax.with_sharding_constraint(params, nnx.get_partition_spec(params))
