"""One run: trains a network, tunes it in every way, and measures.

It trains as the loss study does, on any text. Then it tunes the same parameters in each of the
ways, on the same rows of prose, and takes the held-out loss of prose in the way's own precision, in
BF16 and in COAT_PAPER.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Int32

from coat_jax.training.config import TrainConfig
from coat_jax.training.setup import TrainSetup, prepare
from coat_jax.training.step import State
from experiments.fine_tuning import prose, ways
from experiments.loss_study import operands
from experiments.loss_study import text as texts
from experiments.loss_study.arm import optimizer_of, train_config
from experiments.loss_study.rows import placed_rows
from experiments.loss_study.training import Trained, held_out, told_by, train
from experiments.row_files import Row, rounded
from experiments.study.study import Job
from experiments.study.worker import each


def measure(job: Job) -> list[Row]:
    """Makes a run; see `Study`."""
    told, (row,) = told_by(job), job.rows
    # Before anything is trained: the text may be too short.
    vocab = told.size.model.vocab
    tune, of_others = prose.rows_of(told.text, vocab, told.settings, told.seed, steps=ways.STEPS)
    trained = train(job, keep=True)
    tuner = Tuner(trained, tune, of_others)
    names = row["definition"]["tuned"]["ways"]
    tuned = each(job, {name: partial(tuner.tuned, name) for name in names})
    return [row | trained.row() | {"before": tuner.before(), "tuned": tuned}]


class Tuner:
    """Tunes a trained network, and evaluates it on prose."""

    def __init__(
        self,
        trained: Trained,
        tune: Int32[np.ndarray, " T"],
        held_out: Int32[np.ndarray, " H"],
    ):
        self._trained, self._tune = trained, tune
        before = trained.told.settings
        rate = ways.RATE * before.learning_rate
        self._settings = dataclasses.replace(before, steps=ways.STEPS, learning_rate=rate)
        text, vocab = trained.told.text, trained.config.model.vocab
        self._tokens = {part: texts.load(text, part, vocab) for part in ("train", "held_out")}
        size = self._settings.batch // self._settings.accumulation
        self._held_out = [self._batch("held_out", r, 1) for r in _divided(held_out, size)]

    def before(self) -> dict[str, list[float]]:
        """The held-out losses of the network before it is tuned."""
        return self._evaluated(self._trained.state.params, self._trained.config)

    def tuned(self, name: str) -> dict[str, Any]:
        """Tunes in one of the ways; returns the losses of its steps and its held-out losses."""
        told, mesh, settings = self._trained.told, self._trained.mesh, self._settings
        arm = ways.WAYS[name]
        config = train_config(arm, told.size, settings, told.seed)
        parts = config.gradient_accumulation_steps
        losses = []
        with jax.set_mesh(mesh):
            prepared = prepare(config, mesh, optimizer=optimizer_of(arm, config))
            with operands.rounding(arm.rounded):
                program = prepared.lower().compile()
            state = self._first_state(prepared)
            for rows in self._tune.reshape(settings.steps, settings.batch):
                state, report = program(state, self._batch("train", rows, parts))
                losses.append(report.loss)
        return {
            "losses": [rounded(float(loss)) for loss in losses],
            "skipped": int(state.skipped),
            "held_out": self._evaluated(state.params, config),
        }

    def _first_state(self, prepared: TrainSetup) -> State:
        """The trained parameters, rounded to the dtype that they are tuned in."""

        def rounded_to(new: jax.Array, old: jax.Array) -> jax.Array:
            # A copy, also where the dtype is the same: a step is given its state's memory.
            return jax.device_put(old.astype(new.dtype, copy=True), new.sharding)

        state = prepared.new_state()
        params = jax.tree.map(rounded_to, state.params, self._trained.state.params)
        return state._replace(params=params)

    def _evaluated(self, params: nnx.State, config: TrainConfig) -> dict[str, list[float]]:
        return held_out(params, config, self._trained.mesh, self._held_out)

    def _batch(self, part: str, rows: Int32[np.ndarray, " B"], parts: int) -> Any:
        mesh = self._trained.mesh
        return placed_rows(self._tokens[part], rows, self._settings.sequence, parts, mesh)


def _divided(rows: Int32[np.ndarray, " N"], size: int) -> Int32[np.ndarray, "N//B B"]:
    """Whole batches of some rows; of fewer than one batch, a smaller one."""
    size = min(size, len(rows))
    return rows[: len(rows) // size * size].reshape(-1, size)
