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
from coat_jax.optax import FusedOptimizer, fused_fp8_adamw, in_host_memory, in_place
from coat_jax.storage import PAPER, Storage
from coat_jax.training.config import TrainConfig
from coat_jax.training.config.optimizer import function_name, is_transformation
from coat_jax.training.schedule import learning_rate
from coat_jax.training.stages import with_gradient_norm
from coat_jax.validation import shown


def make_optimizer(config: TrainConfig) -> FusedOptimizer:
    """The optimizer that the config names."""
    optimizer = _optimizer(config)
    if config.optimizer.offload:
        _require_separable(config)
        optimizer = in_host_memory(optimizer)
    return with_gradient_norm(optimizer) if config.optimizer.release_gradients else optimizer


def _require_separable(config: TrainConfig) -> None:
    """Raises unless the optimizer is known to update each parameter by itself."""
    if config.optimizer.transformation is not None:
        raise UserError(
            "optimizer.offload=True steps a part of the parameters at a time, and "
            "optimizer.transformation may need all of them at once: take one of the optimizers "
            "that have names."
        )


def _optimizer(config: TrainConfig) -> FusedOptimizer:
    if config.optimizer.transformation is not None:
        return _in_place(config, _transformation(config))
    if config.optimizer.name == "adamw":
        return _in_place(config, optax.adamw(**_adamw_arguments(config)))
    return fused_fp8_adamw(
        **_adamw_arguments(config),
        round_params=config.optimizer.round_stochastically,
        correct_params=config.optimizer.correct_params,
        storage=storage_of(config),
    )


def _transformation(config: TrainConfig) -> optax.GradientTransformation:
    """The config's transformation, or the one that its function makes from the schedule."""
    given: Any = config.optimizer.transformation
    if is_transformation(given):
        return given
    try:
        made = given(_schedule(config))
    except Exception as error:
        raise UserError(
            f"optimizer.transformation={function_name(given)} fails: {type(error).__name__}: "
            f"{error}. It is called with the schedule of the learning rate."
        ) from error
    if not is_transformation(made):
        raise UserError(
            f"optimizer.transformation returns {shown(made)}, which is not an optax "
            "transformation. Return one, as in lambda schedule: optax.lion(schedule)."
        )
    return made


def require_no_extra_args(optimizer: FusedOptimizer, params: Any, moments: Any) -> None:
    """Raises if a transformation's update needs more than gradients, state and parameters.

    Args:
        optimizer: from `make_optimizer`, of a config with a transformation.
        params: arrays, or shapes and dtypes.
        moments: arrays, or shapes and dtypes.
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


def _in_place(config: TrainConfig, tx: optax.GradientTransformation) -> FusedOptimizer:
    return in_place(
        tx,
        round_params=config.optimizer.round_stochastically,
        correct_params=config.optimizer.correct_params,
        seed=config.seed,
    )


def storage_of(config: TrainConfig) -> Storage:
    """How "fp8_adamw" stores its moments."""
    formats = {
        "directions": Storage(),
        "expanded": Storage(first=E4M3, second=E4M3),
        "paper": PAPER,
    }
    return dataclasses.replace(formats[config.optimizer.moments], seed=config.seed)


def _schedule(config: TrainConfig) -> optax.Schedule:
    """The learning rate by the number of the update."""
    return partial(learning_rate, config.optimizer, config.total_steps)


def _adamw_arguments(config: TrainConfig) -> dict[str, Any]:
    """The arguments that both kinds of AdamW have in common."""
    optimizer = config.optimizer
    return {
        "learning_rate": _schedule(config),
        "b1": optimizer.b1,
        "b2": optimizer.b2,
        "eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "mask": partial(decayed, config),
    }


def decayed(config: TrainConfig, params: Any) -> Any:
    """Which parameters decay: matrices do; the config says whether vectors and the embedding do."""

    def decays(path: Any, leaf: Any) -> bool:
        names = tuple(part.key for part in path if hasattr(part, "key"))
        if leaf.ndim - config.model.is_stacked(names) < 2:
            return config.optimizer.decay_vectors
        return config.optimizer.decay_embedding or names[0] not in config.model.EMBEDDINGS

    return jax.tree.map_with_path(decays, params)
