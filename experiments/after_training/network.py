"""A trained network in BF16, and the rows of text that it is measured on."""

import dataclasses
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Int32, UInt16

from coat_jax import BF16, models
from coat_jax.models import Llama
from coat_jax.training.data import Batch
from coat_jax.training.step import held_out_step
from experiments.loss_study.rows import held_out_batches, placed_rows
from experiments.loss_study.training import Trained, mean_loss

CALIBRATED_AT_ONCE = 16  # rows

_step = jax.jit(held_out_step, static_argnums=0)


class Network:
    """A trained network, its held-out text, and rows to calibrate with.

    Attributes:
        model: the network, computing in BF16 on one device.
    """

    def __init__(
        self,
        trained: Trained,
        tokens: UInt16[np.ndarray, " N"],
        calibration: Int32[np.ndarray, " C"],
    ):
        """Takes a trained network.

        Args:
            trained: the network.
            tokens: of the training text.
            calibration: rows of it.
        """
        self._trained, self._tokens, self._calibration = trained, tokens, calibration
        told, vocab = trained.told, trained.config.model.vocab
        self._held_out = held_out_batches(told.text, vocab, told.settings, trained.mesh)
        self.model = self.with_parameters(trained.state.params)

    def with_parameters(self, params: Any) -> Llama:
        """The network with these parameters."""
        config = dataclasses.replace(self._trained.config.model, precision=BF16)
        graph, state = models.abstract(config)
        arrays = {path: leaf[...] for path, leaf in nnx.to_flat_state(params)}
        flat = {path: leaf.replace(arrays[path]) for path, leaf in nnx.to_flat_state(state)}
        model: Llama = nnx.merge(graph, nnx.from_flat_state(flat))
        return model

    def losses(self, model: Llama) -> list[float]:
        """The held-out loss of each batch, by this model."""
        graph, state = nnx.split(model)
        return [mean_loss(_step(graph, state, batch)) for batch in self._held_out]

    def calibration_batches(self) -> list[Array]:
        """The tokens to calibrate with."""
        rows = self._calibration
        parts = np.array_split(rows, max(len(rows) // CALIBRATED_AT_ONCE, 1))
        return [self.batch(part).tokens[0] for part in parts]

    def batch(self, rows: Any, parts: int = 1) -> Batch:
        """Rows of the training text, on the network's device."""
        sequence, mesh = self._trained.told.settings.sequence, self._trained.mesh
        return placed_rows(self._tokens, rows, sequence, parts, mesh)
