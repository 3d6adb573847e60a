"""The mean loss over held-out batches: the same ones each time, also after a resume.

A batch has as many rows as in training, and is computed in as many microbatches. The loss is a mean
over labels, so it does not depend on the number of microbatches.
"""

import itertools
import math
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from coat_jax.errors import UserError
from coat_jax.training.cluster.mesh import open_data, place
from coat_jax.training.compilation import compiler_options
from coat_jax.training.config import TrainConfig
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

    def measure(self, params: Any) -> tuple[float, dict[str, float]]:
        """Returns the mean loss over all labels of the batches, and means of its statistics."""
        self._data.restore(self._beginning)
        found = []
        for batch in itertools.islice(self._data, self._batches):
            for part in range(self._accumulation):
                rows = jax.tree.map(lambda a, i=part: np.split(a, self._accumulation)[i], batch)
                found.append(self._step(params, place(rows, self._mesh, microbatches=1)))
        self._data.close()  # stop reading ahead
        # In FP64, whatever the number of microbatches.
        sums = jax.tree.map(lambda *parts: math.fsum(map(float, parts)), *found)
        statistics = {name: total / sums.count for name, total in sums.statistics.items()}
        return sums.sum / sums.count, statistics
