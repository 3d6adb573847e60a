"""The optimizer of a run: AdamW in 8 bits, AdamW in FP32, or any optax transformation.

    moments = optimizer.init(params)
    params, moments = optimizer.step(params, grads, moments, grad_scale=clip, skip=not finite)

All optimizers update parameters and moments in place if these are donated, and change nothing if
`skip` is true. With `release_gradients`, the state is a `stages.ReleaseState`.
"""

import dataclasses
import re
from functools import partial
from typing import Any

import jax
import optax

from coat_jax.errors import UserError
from coat_jax.numerics.formats import E4M3
from coat_jax.optax import InPlaceOptimizer, fp8_adamw, in_host_memory, in_place
from coat_jax.storage import PAPER, Storage
from coat_jax.training.config import TrainConfig
from coat_jax.training.config.optimizer import function_name, is_transformation
from coat_jax.training.schedule import learning_rate
from coat_jax.training.stages import with_gradient_norm
from coat_jax.validation import brief


def make_optimizer(config: TrainConfig) -> InPlaceOptimizer:
    """Returns the optimizer that the config names."""
    optimizer = _on_device(config)
    if config.optimizer.offload:
        optimizer = in_host_memory(optimizer)
    return with_gradient_norm(optimizer) if config.optimizer.release_gradients else optimizer


def _on_device(config: TrainConfig) -> InPlaceOptimizer:
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
        tx = _transformation(chosen.transformation, schedule)
    elif chosen.name == "adamw":
        tx = optax.adamw(**adamw)
    else:
        tx = fp8_adamw(**adamw, storage=storage_of(config))
    return in_place(tx, round_params=chosen.round_params, seed=config.seed)


def _transformation(given: Any, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Returns the config's transformation, or the one that its function makes from the schedule."""
    if is_transformation(given):
        return given
    try:
        made = given(schedule)
    except Exception as error:
        raise UserError(
            f"optimizer.transformation={function_name(given)} fails: {type(error).__name__}: "
            f"{error}. It is called with the schedule of the learning rate."
        ) from error
    if not is_transformation(made):
        raise UserError(
            f"optimizer.transformation returns {brief(made)}, which is not an optax "
            "transformation. Return one, as in lambda schedule: optax.lion(schedule)."
        )
    return made


def require_no_extra_args(optimizer: InPlaceOptimizer, params: Any, moments: Any) -> None:
    """Raises if a transformation's update needs more than gradients, state and parameters.

    `optimizer` is from `make_optimizer`; parameters and moments may be shapes and dtypes.
    """
    try:
        jax.eval_shape(optimizer.step, params, params, moments)
    except TypeError as error:
        missing = re.search(r"missing \d+ required keyword-only arguments?: (.*)", str(error))
        if missing is None:
            raise
        raise UserError(
            f"The update of optimizer.transformation needs {missing[1]}, and the trainer passes "
            "gradients, state and parameters only. Choose another transformation, or write the "
            "training loop yourself and pass them to the step of coat.optax.in_place."
        ) from error


def storage_of(config: TrainConfig) -> Storage:
    """Returns how "fp8_adamw" stores its moments."""
    formats = {
        "directions": Storage(),
        "expanded": Storage(first=E4M3, second=E4M3),
        "paper": PAPER,
    }
    return dataclasses.replace(formats[config.optimizer.moments], seed=config.seed)


def decay_mask(config: TrainConfig, params: Any) -> Any:
    """Returns which parameters decay: matrices, and by the config vectors and the embedding."""

    def decays(path: Any, leaf: Any) -> bool:
        names = tuple(part.key for part in path if hasattr(part, "key"))
        if leaf.ndim - config.model.is_stacked(names) < 2:
            return config.optimizer.decay_vectors
        return config.optimizer.decay_embedding or names[0] not in config.model.EMBEDDINGS

    return jax.tree.map_with_path(decays, params)
