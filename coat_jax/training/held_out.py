"""The mean loss over held-out batches: the same ones each time, also after a resume.

A batch has as many rows as in training, and is computed in as many microbatches. The loss is a mean
over labels, so it does not depend on the number of microbatches.
"""

import itertools
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from coat_jax.errors import UserError
from coat_jax.training.cluster.batches import open_data, place
from coat_jax.training.compiler_options import compiler_options
from coat_jax.training.config import TrainConfig
from coat_jax.training.data import Batch
from coat_jax.training.step import held_out_step


class Evaluation:
    """Held-out data and the function that is evaluated on it, compiled at its first use."""

    def __init__(self, config: TrainConfig, graph: Any, mesh: Mesh):
        self._mesh = mesh
        self._data = open_data(config, mesh, "held_out")
        self._beginning = self._data.state()
        self._batches = config.evaluation.batches
        self._accumulation = config.gradient_accumulation_steps
        if not self._data.has_labels(self._batches):
            raise UserError(
                f"The first evaluation.batches={self._batches} held-out batches have no token to "
                "predict. Raise it, or name other files in data.held_out."
            )
        self._step = jax.jit(
            partial(held_out_step, graph), compiler_options=compiler_options(config, mesh)
        )

    def loss(self, params: Any) -> float:
        """The mean over all labels of the held-out batches."""
        self._data.restore(self._beginning)
        losses, labels = [], []
        for part in self._microbatches():
            placed = place(part, self._mesh, microbatches=1, packed=self._data.packed)
            result = self._step(params, placed)
            losses.append(result.loss)
            labels.append(result.labels)
        self._data.close()  # stop reading ahead
        return math.fsum(map(float, losses)) / sum(map(int, labels))

    def _microbatches(self) -> Iterator[Batch]:
        for batch in itertools.islice(self._data, self._batches):
            for arrays in zip(
                *(np.split(array, self._accumulation) for array in batch), strict=True
            ):
                yield Batch(*arrays)
