"""One run of `fine_tuning`, in a process of its own: trains, tunes in every way, and measures.

    python -m experiments.fine_tuning.run JOB.json

It trains as `loss_study.run` does, on any text. Then it tunes the same parameters in each of the
ways, on the same rows of prose, and takes the held-out loss of prose in the way's own precision, in
BF16 and in COAT_PAPER. Each way is written to measured.json in the run's folder, so that a run that
was stopped continues where it was.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Int32

from coat_jax import writing
from coat_jax.training.config import TrainConfig
from coat_jax.training.preparation import Prepared, prepare
from coat_jax.training.state import State
from experiments.fine_tuning import prose, ways
from experiments.fine_tuning.ways import WAYS
from experiments.loss_study import arms, operands, results, sums
from experiments.loss_study import text as texts
from experiments.loss_study.arm import Arm, Settings, optimizer_of, train_config
from experiments.loss_study.rows import placed_rows
from experiments.loss_study.run import (
    FORWARDS,
    Job,
    Trained,
    held_out,
    rounded,
    say_progress,
    train,
    work,
)
from experiments.row_files import Row

Found = dict[str, Any]


def main() -> None:
    """Trains, tunes, and writes the row unless it was stopped."""
    work(run, __doc__)


def row_of(*arguments: Any, of: Mapping[str, Arm] = WAYS) -> Row:
    """A row before it is measured: that of `loss_study`, and how it is tuned."""
    row = results.row_of(*arguments)
    row["definition"] |= {"tuned": ways.definitions(of)}
    return row | {"key": results.key_of(row)}


def cost_of(settings: Settings, *, of: Mapping[str, Arm] = WAYS, more: int = 0) -> float:
    """A run, in tokens that are trained on: a forward pass takes a third of a step's time.

    Args:
        settings: of the training before.
        of: the ways to tune.
        more: evaluations besides those of each way.
    """
    steps = settings.steps + len(of) * ways.STEPS
    forwards = (1 + len(of)) * (1 + len(FORWARDS)) + more
    return settings.sequence * (steps * settings.batch + forwards * settings.held_out / 3)


def tuning(settings: Settings) -> Settings:
    """The settings of tuning, by those of the training before."""
    rate = ways.RATE * settings.learning_rate
    return dataclasses.replace(settings, steps=ways.STEPS, learning_rate=rate)


def run(job: Job, stopped: list[int]) -> Found | None:
    """What was measured; None if somebody wrote to `stopped` before it was complete."""
    tuner = tuned(job, stopped, WAYS)
    return None if tuner is None else tuner.row()


def tuned(job: Job, stopped: list[int], of: Mapping[str, Arm]) -> "Tuner | None":
    """A trained network after it was tuned in each way; None if it was stopped before."""
    settings, vocab = Settings(**job.settings), arms.SIZES[job.size].model.vocab
    # Before anything is trained: the text may be too short.
    rows = prose.rows_of(Path(job.text), vocab, settings, job.seed, steps=ways.STEPS)
    trained = train(job, stopped, keep=True)
    if trained is None:
        return None
    tuner = Tuner(trained, rows)
    for number, (name, arm) in enumerate(of.items(), start=1):
        if name in tuner.found:
            continue
        if stopped:
            return None
        loss = tuner.tune(name, arm)
        say_progress(Path(job.folder), number, len(of), loss)
    return tuner


class Tuner:
    """Tunes a trained network, and evaluates it on prose.

    Attributes:
        trained: the network.
        found: what was measured of each way.
        held_out: batches of prose that is held out.
    """

    def __init__(self, trained: Trained, rows: prose.Rows):
        self.trained, self._rows = trained, rows
        self._settings = tuning(trained.settings)
        text, vocab = Path(trained.job.text), trained.config.model.vocab
        self._tokens = {part: texts.load(text, part, vocab) for part in ("train", "held_out")}
        self._file = Path(trained.job.folder) / "measured.json"
        self.found: Found = json.loads(self._file.read_text()) if self._file.exists() else {}
        size = self._settings.batch // self._settings.accumulation
        self.held_out = [self._batch("held_out", part, 1) for part in _divided(rows.held_out, size)]

    def row(self) -> Found:
        """What a row says of the network, before it was tuned and after."""
        before = self._evaluated(self.trained.state.params, self.trained.config)
        return self.trained.row() | {"before": before, "tuned": self.found}

    def tune(self, name: str, arm: Arm) -> float:
        """Tunes in one of the ways, and finds the losses of its steps and its held-out loss.

        Returns:
            The loss of the last step.
        """
        job, mesh, settings = self.trained.job, self.trained.mesh, self._settings
        config = train_config(arm, arms.SIZES[job.size], settings, job.seed)
        parts = config.gradient_accumulation_steps
        losses = []
        with jax.set_mesh(mesh):
            prepared = prepare(config, mesh, optimizer=optimizer_of(arm, config))
            with operands.rounding(arm.rounded), sums.accurate(arm.accurate):
                program = prepared.lower().compile()
            state = self._first_state(prepared)
            for rows in self._rows.tune.reshape(settings.steps, settings.batch):
                state, report = program(state, self._batch("train", rows, parts))
                losses.append(report.loss)
        self.found[name] = {
            "losses": [rounded(float(loss)) for loss in losses],
            "skipped": int(state.skipped),
            "held_out": self._evaluated(state.params, config),
        }
        writing.replace(self._file, json.dumps(self.found))
        return rounded(float(losses[-1]))

    def _first_state(self, prepared: Prepared) -> State:
        """The trained parameters, rounded to the dtype that they are tuned in."""

        def rounded_to(new: jax.Array, old: jax.Array) -> jax.Array:
            # A copy, also where the dtype is the same: a step is given its state's memory.
            return jax.device_put(old.astype(new.dtype, copy=True), new.sharding)

        state = prepared.new_state()
        params = jax.tree.map(rounded_to, state.params, self.trained.state.params)
        return state._replace(params=params)

    def _evaluated(self, params: nnx.State, config: TrainConfig) -> dict[str, list[float]]:
        return held_out(params, config, self.trained.mesh, self.held_out)

    def _batch(self, part: str, rows: Int32[np.ndarray, " B"], parts: int) -> Any:
        sequence, mesh = self._settings.sequence, self.trained.mesh
        return placed_rows(self._tokens[part], rows, sequence, parts, mesh)


def _divided(rows: Int32[np.ndarray, " N"], size: int) -> Int32[np.ndarray, "N//B B"]:
    """Whole batches of some rows; of fewer than one batch, a smaller one."""
    size = min(size, len(rows))
    return rows[: len(rows) // size * size].reshape(-1, size)


if __name__ == "__main__":
    main()
