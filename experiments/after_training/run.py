"""One run of `after_training`, in a process of its own: trains, quantizes, and measures.

    python -m experiments.after_training.run JOB.json

It trains as `loss_study.run` does. What is measured is written to measured.json in the run's folder
piece by piece, so that a run that was stopped continues where it was:

    held out      the held-out loss of the network, in BF16 and in its own precision
    quantized     by each recipe
    further       after some more steps: in BF16, and in a precision that anticipates INT8 or FP8;
                  of each the loss in BF16, and by some recipes
"""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Int32, UInt16

from coat_jax import BF16, Precision, models, writing
from coat_jax.models import Llama
from coat_jax.quantization import Ranges, Recipe, calibrate, quantize
from coat_jax.training.data import Batch
from coat_jax.training.preparation import prepare
from coat_jax.training.step import held_out_step
from experiments import row_files
from experiments.after_training import recipes
from experiments.after_training.recipes import AFTER_FURTHER, FURTHER, RECIPES
from experiments.loss_study import arms, results
from experiments.loss_study import text as texts
from experiments.loss_study.arm import Settings, train_config
from experiments.loss_study.rows import held_out_batches, placed_rows, row_order
from experiments.loss_study.run import Job, Trained, mean_loss, say_progress, train, work
from experiments.row_files import Row

CALIBRATED_AT_ONCE = 16  # rows
Losses = dict[str, Any]

_step = jax.jit(held_out_step, static_argnums=0)


def main() -> None:
    """Trains, quantizes, and writes the row unless it was stopped."""
    work(run, __doc__)


def row_of(*arguments: Any) -> Row:
    """A row before it is measured: that of `loss_study`, and what happens after training."""
    row = results.row_of(*arguments)
    row["definition"] |= {results.AFTER_TRAINING: row_files.digest(recipes.described())}
    return row | {"key": results.key_of(row)}


def cost_of(settings: Settings) -> float:
    """A run, in tokens that are trained on: a forward pass takes a third of a step's time."""
    steps = settings.steps + len(FURTHER) * recipes.FURTHER_STEPS
    forwards = 3 + len(RECIPES) + len(FURTHER) * (1 + len(AFTER_FURTHER))
    return settings.sequence * (steps * settings.batch + forwards * settings.held_out / 3)


def run(job: Job, stopped: list[int]) -> Losses | None:
    """What was measured; None if somebody wrote to `stopped` before it was complete."""
    rows = _rows(job)  # before anything is trained: the text may be too short
    trained = train(job, stopped, keep=True)
    if trained is None:
        return None
    file = Path(job.folder) / "measured.json"
    found: Losses = json.loads(file.read_text()) if file.exists() else {}
    measurements = dict(_measurements(_After(trained, rows)))
    for name, measure in measurements.items():
        if name not in found:
            if stopped:
                return None
            found[name] = measure()
            writing.replace(file, json.dumps(found))
            say_progress(file.parent, len(found), len(measurements), trained.losses[-1])
    quantized = {name: found[name] for name in RECIPES}
    further = {name: found[_further(name)] for name in FURTHER}
    return trained.row() | {
        "held_out": found["held out"],
        "quantized": quantized,
        "further": further,
    }


def _measurements(after: "_After") -> Iterator[tuple[str, Callable[[], Losses]]]:
    """The measurements by name; nothing is computed before one is called."""
    yield "held out", after.trained.held_out
    for name in RECIPES:
        yield name, lambda name=name: after.quantized(after.model, name)
    for name, precision in FURTHER.items():
        yield _further(name), lambda precision=precision: after.further(precision)


def _further(name: str) -> str:
    return f"further in {name}"


class _Rows(NamedTuple):
    """Rows of the training text.

    Attributes:
        tokens: of the text.
        calibration: some that the run has read.
        further: those after all that it has read.
    """

    tokens: UInt16[np.ndarray, " N"]
    calibration: Int32[np.ndarray, " C"]
    further: Int32[np.ndarray, " R"]


def _rows(job: Job) -> _Rows:
    """The rows of a run; raises if the text has not enough of them."""
    tokens = texts.load(Path(job.text), "train", arms.SIZES[job.size].model.vocab)
    settings = Settings(**job.settings)
    longer = dataclasses.replace(settings, steps=settings.steps + recipes.FURTHER_STEPS)
    order = row_order(tokens, longer, job.seed)
    return _Rows(tokens, order[: recipes.CALIBRATION], order[settings.rows :])


class _After:
    """A trained network, the rows that it is measured on, and the ranges of one of its variants."""

    def __init__(self, trained: Trained, rows: _Rows):
        self.trained, self._rows = trained, rows
        text, vocab = Path(trained.job.text), trained.config.model.vocab
        self._held_out = held_out_batches(text, vocab, trained.settings, trained.mesh)
        self._ranges: tuple[Llama, Ranges] | None = None
        self.model = self._model(trained.state.params)

    def quantized(self, model: Llama, name: str) -> list[float]:
        """The held-out loss of each batch, by a recipe."""
        recipe = RECIPES[name]
        ranges = self._calibrated(model, recipe) if recipe.calibrated else None
        return self._losses(quantize(model, recipe, ranges))

    def further(self, precision: Precision) -> Losses:
        """The held-out losses after some more steps in this precision, by some recipes."""
        model = self._model(self._trained_further(precision))
        found = {"bf16": self._losses(model)}
        return found | {name: self.quantized(model, name) for name in AFTER_FURTHER}

    def _model(self, params: Any) -> Llama:
        """The network with these parameters, computing in BF16 on one device."""
        config = dataclasses.replace(self.trained.config.model, precision=BF16)
        graph, state = models.abstract(config)
        arrays = {path: leaf[...] for path, leaf in nnx.to_flat_state(params)}
        flat = {path: leaf.replace(arrays[path]) for path, leaf in nnx.to_flat_state(state)}
        model: Llama = nnx.merge(graph, nnx.from_flat_state(flat))
        return model

    def _losses(self, model: Llama) -> list[float]:
        graph, state = nnx.split(model)
        return [mean_loss(_step(graph, state, batch)) for batch in self._held_out]

    def _calibrated(self, model: Llama, recipe: Recipe) -> Ranges:
        """The ranges of inputs, which do not depend on the recipe here: none leaves layers out."""
        if self._ranges is None or self._ranges[0] is not model:
            rows = self._rows.calibration
            parts = np.array_split(rows, max(len(rows) // CALIBRATED_AT_ONCE, 1))
            batches = (self._batch(part).tokens[0] for part in parts)
            self._ranges = model, calibrate(model, batches, recipe)
        return self._ranges[1]

    def _batch(self, rows: Any, parts: int = 1) -> Batch:
        sequence, mesh = self.trained.settings.sequence, self.trained.mesh
        return placed_rows(self._rows.tokens, rows, sequence, parts, mesh)

    def _trained_further(self, precision: Precision) -> Any:
        """The parameters after some more steps, from the trained ones."""
        job, mesh = self.trained.job, self.trained.mesh
        arm = dataclasses.replace(arms.ARMS[job.arm], precision=precision, start=None, moments=None)
        settings = self.trained.settings
        settings = dataclasses.replace(
            settings,
            steps=recipes.FURTHER_STEPS,
            learning_rate=recipes.FURTHER_RATE * settings.learning_rate,
        )
        config = train_config(arm, arms.SIZES[job.size], settings, job.seed)
        rows = self._rows.further.reshape(settings.steps, settings.batch)
        with jax.set_mesh(mesh):
            prepared = prepare(config, mesh)
            program = prepared.lower().compile()
            # A step is given its state's memory: the trained parameters are needed again.
            params = jax.tree.map(jnp.copy, self.trained.state.params)
            state = prepared.new_state()._replace(params=params)
            for part in rows:
                state, _ = program(state, self._batch(part, config.gradient_accumulation_steps))
        return state.params


if __name__ == "__main__":
    main()
