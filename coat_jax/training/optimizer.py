"""The optimizer of a run: AdamW in 8 bits, AdamW in FP32, or any optax transformation.

    moments = optimizer.init(params)
    params, moments = optimizer.step(params, grads, moments, grad_scale=clip, skip=not finite)

All optimizers update parameters and moments in place if these are donated, and change nothing if
`skip` is true.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from coat_jax.errors import UserError
from coat_jax.numerics.formats import E4M3
from coat_jax.optax import InPlaceOptimizer, fp8_adamw, in_host_memory, in_place
from coat_jax.storage import PAPER, Storage
from coat_jax.training.config import OptimizerConfig, TrainConfig
from coat_jax.training.config.optimizer import is_transformation
from coat_jax.validation import brief

# How "fp8_adamw" stores its moments.
MOMENTS = {
    "directions": Storage(),
    "expanded": Storage(first=E4M3, second=E4M3),
    "paper": PAPER,
}


def make_optimizer(config: TrainConfig) -> InPlaceOptimizer:
    """Returns the optimizer that the config names."""
    chosen = config.optimizer
    schedule = partial(learning_rate, chosen, config.total_steps)
    adamw: dict[str, Any] = {
        "learning_rate": schedule,
        "b1": chosen.b1,
        "b2": chosen.b2,
        "eps": chosen.eps,
        "weight_decay": chosen.weight_decay,
        "mask": partial(decay_mask, config),
    }
    if chosen.transformation is not None:
        tx: Any = chosen.transformation
        tx = tx if is_transformation(tx) else tx(schedule)
        if not is_transformation(tx):
            raise UserError(
                f"optimizer.transformation returns {brief(tx)}, which is not an optax "
                "transformation. Return one, as in lambda schedule: optax.lion(schedule)."
            )
    elif chosen.name == "adamw":
        tx = optax.adamw(**adamw)
    else:
        storage = dataclasses.replace(MOMENTS[chosen.moments], seed=config.seed)
        tx = fp8_adamw(**adamw, storage=storage)
    optimizer = in_place(tx, round_params=chosen.round_params, seed=config.seed)
    return in_host_memory(optimizer) if chosen.offload else optimizer


def learning_rate(
    config: OptimizerConfig, total_steps: int, count: Int[ArrayLike, ""]
) -> Float[Array, ""]:
    """Returns the learning rate of the update after `count` others: 0 to total_steps - 1.

    It rises linearly for `warmup_steps`, and then follows the schedule down to `final_ratio` of the
    highest rate: half a cosine, a straight line, or for "wsd" a straight line in the last
    `decay_steps`.
    """
    done = jnp.asarray(count, jnp.float32)
    rising, at_end = config.phases(total_steps)
    stable = total_steps - at_end if config.schedule == "wsd" else rising
    # The fraction of the decay that is done; one step after the last it would be 1.
    progress = jnp.clip((done - stable) / max(total_steps - stable, 1), 0.0, 1.0)
    shapes = {"cosine": (1 + jnp.cos(jnp.pi * progress)) / 2, "constant": jnp.ones([])}
    factor = shapes.get(config.schedule, 1 - progress)
    falling = config.final_ratio + (1 - config.final_ratio) * factor
    return config.learning_rate * jnp.where(done < rising, (done + 1) / max(rising, 1), falling)


def decay_mask(config: TrainConfig, params: Any) -> Any:
    """Returns which parameters decay: matrices, and by the config vectors and the embedding."""

    def decays(path: Any, leaf: Any) -> bool:
        names = tuple(part.key for part in path if hasattr(part, "key"))
        if leaf.ndim - config.model.is_stacked(names) < 2:
            return config.optimizer.decay_vectors
        return config.optimizer.decay_embedding or not {*names} & {*config.model.EMBEDDINGS}

    return jax.tree.map_with_path(decays, params)
