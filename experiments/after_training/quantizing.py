"""One run: trains a network, quantizes it, and measures.

held out      the held-out loss of the network, in BF16 and in its own precision
quantized     by each recipe
further       after some more steps: in BF16, and in a precision that anticipates INT8 or FP8;
              of each the loss in BF16, and by some recipes
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32, UInt16

from coat_jax import Precision
from coat_jax.models import Llama
from coat_jax.quantization import Ranges, Recipe, calibrate, quantize
from coat_jax.training.setup import prepare
from experiments.after_training import recipes
from experiments.after_training.network import Network
from experiments.after_training.recipes import AFTER_FURTHER, FURTHER, RECIPES
from experiments.loss_study import text as texts
from experiments.loss_study.arm import train_config
from experiments.loss_study.rows import row_order
from experiments.loss_study.training import Told, Trained, told_by, train
from experiments.row_files import Row
from experiments.study.study import Job
from experiments.study.worker import each

Losses = dict[str, Any]


def measure(job: Job) -> list[Row]:
    """Makes a run; see `Study`."""
    rows = rows_of(told_by(job))  # before anything is trained: the text may be too short
    trained = train(job, keep=True)
    after = After(trained, rows)
    parts: dict[str, Callable[[], Any]] = {"held out": trained.held_out}
    parts |= {name: partial(after.quantized, after.model, name) for name in RECIPES}
    of_further = {name: f"further in {name}" for name in FURTHER}
    parts |= {of_further[name]: partial(after.further, how) for name, how in FURTHER.items()}
    found = each(job, parts)
    measured = {
        "held_out": found["held out"],
        "quantized": {name: found[name] for name in RECIPES},
        "further": {name: found[part] for name, part in of_further.items()},
    }
    return [job.rows[0] | trained.row() | measured]


class Rows(NamedTuple):
    """Rows of the training text.

    Attributes:
        tokens: of the text.
        calibration: some that the run has read.
        further: those after all that it has read.
    """

    tokens: UInt16[np.ndarray, " N"]
    calibration: Int32[np.ndarray, " C"]
    further: Int32[np.ndarray, " R"]


def rows_of(told: Told) -> Rows:
    """The rows of a run; raises if the text has not enough of them."""
    tokens = texts.load(told.text, "train", told.size.model.vocab)
    settings = told.settings
    longer = dataclasses.replace(settings, steps=settings.steps + recipes.FURTHER_STEPS)
    order = row_order(tokens, longer, told.seed)
    return Rows(tokens, order[: recipes.CALIBRATION], order[settings.rows :])


class After:
    """A trained network, and the ranges of one of its variants."""

    def __init__(self, trained: Trained, rows: Rows):
        self._trained, self._rows = trained, rows
        self._network = Network(trained, rows.tokens, rows.calibration)
        self._ranges: tuple[Llama, Ranges] | None = None
        self.model = self._network.model

    def quantized(self, model: Llama, name: str) -> list[float]:
        """The held-out loss of each batch, by a recipe."""
        recipe = RECIPES[name]
        ranges = self._calibrated(model, recipe) if recipe.needs_calibration else None
        return self._network.losses(quantize(model, recipe, ranges))

    def further(self, precision: Precision) -> Losses:
        """The held-out losses after some more steps in this precision, by some recipes."""
        model = self._network.with_parameters(self._trained_further(precision))
        found = {"bf16": self._network.losses(model)}
        return found | {name: self.quantized(model, name) for name in AFTER_FURTHER}

    def _calibrated(self, model: Llama, recipe: Recipe) -> Ranges:
        """The ranges of inputs, which do not depend on the recipe here: none leaves layers out."""
        if self._ranges is None or self._ranges[0] is not model:
            batches = self._network.calibration_batches()
            self._ranges = model, calibrate(model, batches, recipe)
        return self._ranges[1]

    def _trained_further(self, precision: Precision) -> Any:
        """The parameters after some more steps, from the trained ones."""
        told, mesh = self._trained.told, self._trained.mesh
        arm = dataclasses.replace(told.arm, precision=precision, start=None, moments=None)
        settings = dataclasses.replace(
            told.settings,
            steps=recipes.FURTHER_STEPS,
            learning_rate=recipes.FURTHER_RATE * told.settings.learning_rate,
        )
        config = train_config(arm, told.size, settings, told.seed)
        rows = self._rows.further.reshape(settings.steps, settings.batch)
        with jax.set_mesh(mesh):
            prepared = prepare(config, mesh)
            program = prepared.lower().compile()
            # A step is given its state's memory: the trained parameters are needed again.
            params = jax.tree.map(jnp.copy, self._trained.state.params)
            state = prepared.new_state()._replace(params=params)
            for part in rows:
                state, _ = program(
                    state, self._network.batch(part, config.gradient_accumulation_steps)
                )
        return state.params
