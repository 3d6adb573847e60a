"""Muon for the arms of `loss_study`: with an FP32 momentum by optax, or stored as a `Storage` says.

Both update the hidden matrices by Muon and the rest by AdamW, with the learning rate, weight decay
and moments' decay of the run. Updates are scaled to the root mean square of AdamW's, so that a size
trains at the learning rate that it has for AdamW.
"""

import dataclasses
from functools import partial

import jax.numpy as jnp
import optax

from coat_jax.optax import InPlaceOptimizer, fp8_muon, hidden_matrices, in_place
from coat_jax.storage import Storage
from coat_jax.training.config import TrainConfig
from coat_jax.training.optimizer import learning_rate

RMS = 0.2  # of an update, about that of AdamW's


@dataclasses.dataclass(frozen=True)
class Muon:
    """How Muon's momentum, and the moments of its AdamW, are stored.

    Attributes:
        storage: for `coat_jax.optax.fp8_muon`, whose products are in BF16; None is
            `optax.contrib.muon`, with states and products in FP32 (which GPUs multiply as TF32).
    """

    storage: Storage | None = None


def muon(config: TrainConfig, kind: Muon) -> InPlaceOptimizer:
    """The optimizer of a run. Parameters are FP32."""
    of_run = config.optimizer
    settings = {
        "learning_rate": partial(learning_rate, of_run, config.total_steps),
        "weight_decay": of_run.weight_decay,
        "adam_b1": of_run.b1,
        "adam_b2": of_run.b2,
        "consistent_rms": RMS,
        "muon_weight_dimension_numbers": hidden_matrices,
    }
    if kind.storage is None:
        return in_place(optax.contrib.muon(**settings, mu_dtype=jnp.float32))
    return in_place(fp8_muon(**settings, storage=kind.storage))
