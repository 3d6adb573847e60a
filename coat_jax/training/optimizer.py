"""The two optimizers of the trainer, with one face: AdamW in 8 bits, and optax's in FP32.

    moments = optimizer.init(params)
    params, moments = optimizer.step(params, grads, moments, grad_scale=clip, skip=not finite)

Both step in place where parameters and moments are donated, and change nothing where they skip.
The baseline is as lean as optax allows: one pass over each array, with moments in FP32 also for
BF16 parameters.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from coat_jax.numerics.formats import E4M3
from coat_jax.optax import apply_updates, fused_fp8_adamw
from coat_jax.storage import PAPER, Storage
from coat_jax.training.config import TrainConfig
from coat_jax.training.schedule import learning_rate


class Optimizer(NamedTuple):
    """`init(params) -> moments`, and `step` as in `coat.optax.FusedOptimizer`."""

    init: Callable[[Any], Any]
    step: Callable[..., tuple[Any, Any]]


def make_optimizer(config: TrainConfig) -> Optimizer:
    """The optimizer that the config names."""
    return {"fp8_adamw": _fp8_adamw, "adamw": _adamw}[config.optimizer.name](config)


def _fp8_adamw(config: TrainConfig) -> Optimizer:
    fused = fused_fp8_adamw(
        **_hyper(config),
        round_params=config.optimizer.round_stochastically,
        storage=storage_of(config),
    )
    return Optimizer(fused.init, fused.step)


def storage_of(config: TrainConfig) -> Storage:
    """How "fp8_adamw" stores its moments."""
    formats = {
        "directions": Storage(),
        "expanded": Storage(first=E4M3, second=E4M3),
        "paper": PAPER,
    }
    return dataclasses.replace(formats[config.optimizer.moments], seed=config.seed)


def _adamw(config: TrainConfig) -> Optimizer:
    tx = optax.adamw(**_hyper(config))

    def init(params: Any) -> Any:
        return tx.init(_in_fp32(params))

    def step(
        params: Any, grads: Any, moments: Any, *, grad_scale: Any = 1.0, skip: Any = False
    ) -> tuple[Any, Any]:
        scaled = jax.tree.map(lambda g: g * grad_scale, _in_fp32(grads))
        updates, new_moments = tx.update(scaled, moments, _in_fp32(params))
        if config.optimizer.round_stochastically:
            count = new_moments[0].count
            new_params = apply_updates(params, updates, step=count, seed=config.seed)
        else:
            new_params = optax.apply_updates(params, updates)
        old, new = (params, moments), (new_params, new_moments)
        return jax.tree.map(lambda before, after: jnp.where(skip, before, after), old, new)

    return Optimizer(init, step)


def _hyper(config: TrainConfig) -> dict[str, Any]:
    """The arguments that both have in common."""
    optimizer = config.optimizer
    return {
        "learning_rate": partial(learning_rate, optimizer, config.total_steps),
        "b1": optimizer.b1,
        "b2": optimizer.b2,
        "eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "mask": partial(decayed, config),
    }


def decayed(config: TrainConfig, params: Any) -> Any:
    """Which parameters decay: matrices do; the config says whether vectors and the embedding do."""

    def decays(path: Any, leaf: Any) -> bool:
        outermost = path[0].key
        stacked = config.model.scan and outermost == "layers"
        if leaf.ndim - stacked < 2:
            return config.optimizer.decay_vectors
        return config.optimizer.decay_embedding or outermost != "embed"

    return jax.tree.map_with_path(decays, params)


def _in_fp32(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)
