"""One run of `loss_study`, in a process of its own: trains one arm from one seed.

    python -m experiments.loss_study.run JOB.json

The job names arm, size, seed and settings, the folder of the text and the folder of the run:

    folder/progress.json     step and loss, every few seconds
    folder/checkpoint/       the state, if the run was stopped; it continues from there
    folder/row.json          the result, when the run is complete

All arms of a seed start from the same parameters and read the same rows in the same order: a
permutation of all rows, taken from the front, so that no token is read twice. At the end the
held-out loss is measured with the forward pass in the arm's own precision, in BF16 and in
COAT_PAPER. Arms that round single operands of products do so in training only.
"""

import argparse
import contextlib
import dataclasses
import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from coat_jax import BF16, COAT_PAPER, Precision, models, writing
from coat_jax.training.checkpoint import Checkpoints
from coat_jax.training.cluster.mesh import make_mesh
from coat_jax.training.config import MeshConfig, TrainConfig
from coat_jax.training.data import Batch
from coat_jax.training.preparation import Prepared, prepare
from coat_jax.training.state import State
from coat_jax.training.step import HeldOut, held_out_step
from experiments import row_files
from experiments.loss_study import arms, operands, sums
from experiments.loss_study import text as texts
from experiments.loss_study.arm import (
    Settings,
    optimizer_of,
    precisions_of,
    train_config,
)
from experiments.loss_study.rows import held_out_batches, placed_rows, row_order

# Besides the precision of the arm itself; "coat" continues with the rounded values.
FORWARDS = {"bf16": BF16, "coat": COAT_PAPER}
BEHIND = 2  # steps that are started before the loss of one is read
SHAKE = 0.01  # the deviation of a random change of an initial parameter, as a share of it
SAY_EVERY = 3.0  # seconds
STOPPED = 143  # the exit status of a run that was stopped, as after SIGTERM


class Job(NamedTuple):
    """The arguments of a run.

    Attributes:
        arm: a name in `arms.ARMS`.
        size: a name in `arms.SIZES`.
        seed: of the initial parameters and of the order of the rows.
        settings: of the run.
        text: the folder of the text.
        folder: of the run.
    """

    arm: str
    size: str
    seed: int
    settings: dict[str, Any]
    text: str
    folder: str


class Trained(NamedTuple):
    """A run after its last step.

    Attributes:
        job: what it was told.
        config: of the run, in the precision of its last step.
        settings: of the run.
        mesh: of one device.
        state: after the last step.
        losses: of all steps.
        skipped: steps that changed nothing.
        seconds: to compile, and to train.
    """

    job: Job
    config: TrainConfig
    settings: Settings
    mesh: Mesh
    state: State
    losses: list[float]
    skipped: int
    seconds: dict[str, float]

    def row(self) -> dict[str, Any]:
        """The fields that every row has."""
        return {
            "losses": [rounded(loss) for loss in self.losses],
            "skipped": self.skipped,
            "seconds": {name: round(value, 1) for name, value in self.seconds.items()},
            "parents": row_files.parents(),
        }

    def held_out(self) -> dict[str, list[float]]:
        """The held-out loss of each batch, under each precision of the forward pass."""
        text, vocab = Path(self.job.text), self.config.model.vocab
        batches = held_out_batches(text, vocab, self.settings, self.mesh)
        return held_out(self.state.params, self.config, self.mesh, batches)


Run = Callable[[Job, list[int]], dict[str, Any] | None]


def main() -> None:
    """Trains, and writes the row unless it was stopped."""
    work(run, __doc__)


def work(run: Run, explanation: str | None) -> None:
    """The program of a process that makes one run.

    Args:
        run: makes it; returns None if somebody wrote to the list before it was complete.
        explanation: of the program.
    """
    parser = argparse.ArgumentParser(
        description=explanation, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", metavar="JOB.json", type=Path, help="what to run")
    job = Job(**json.loads(parser.parse_args().job.read_text()))
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    result = run(job, stopped)
    if result is None:
        sys.exit(STOPPED)
    writing.replace(Path(job.folder) / "row.json", json.dumps(result))


def run(job: Job, stopped: list[int]) -> dict[str, Any] | None:
    """What was measured; None if somebody wrote to `stopped` before the last step."""
    trained = train(job, stopped)
    if trained is None:
        return None
    return trained.row() | {"held_out": trained.held_out()}


def train(job: Job, stopped: list[int], *, keep: bool = False) -> Trained | None:
    """Trains; None if somebody wrote to `stopped` before the last step: then the state is saved.

    Args:
        job: what to train.
        stopped: see above.
        keep: saves the state after the last step, too, so that no later call trains again.
    """
    begin = time.perf_counter()
    arm, size = arms.ARMS[job.arm], arms.SIZES[job.size]
    settings = Settings(**job.settings)
    config = train_config(arm, size, settings, job.seed)
    tokens = texts.load(Path(job.text), "train", config.model.vocab)
    order = row_order(tokens, settings, job.seed)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    folder = Path(job.folder)
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.set_mesh(mesh))
        saved = stack.enter_context(Checkpoints(folder / "checkpoint", keep=1, keep_best=0))
        prepared = prepare(config, mesh, optimizer=optimizer_of(arm, config))
        losses: list[float] = []
        seconds = 0.0
        if saved.latest() is None:
            state = first_state(prepared, job)
        else:
            _, state, extra = saved.restore(prepared.abstract)
            losses, seconds = extra["losses"], extra["seconds"]
        before = len(losses)
        programs = {}
        if before < settings.steps:
            with operands.rounding(arm.rounded), sums.accurate(arm.accurate):
                programs = {
                    step: _in_precision(precision, prepared).lower().compile()
                    for step, precision in precisions_of(arm, settings.steps).items()
                }
        compiled = time.perf_counter() - begin
        stream = _Losses(folder, losses, settings.steps)
        began = time.perf_counter()
        for step in range(before, settings.steps):
            if stopped:
                break
            rows = order[step * settings.batch : (step + 1) * settings.batch]
            batch = placed_rows(
                tokens, rows, settings.sequence, config.gradient_accumulation_steps, mesh
            )
            program = programs[max(first for first in programs if first <= step)]
            state, report = program(state, batch)
            stream.take(report.loss)
        stream.finish()
        seconds += time.perf_counter() - began
        complete = len(losses) == settings.steps
        if len(losses) > before and (keep or not complete):
            extra = {"losses": losses, "seconds": seconds}
            saved.save(len(losses), state, extra, wait=True)
    if not complete:
        return None
    times = {"compile": compiled, "train": seconds}
    return Trained(job, config, settings, mesh, state, losses, int(state.skipped), times)


def _in_precision(precision: Precision, run: Prepared) -> Prepared:
    """What the steps of a run in this precision are compiled from."""
    if precision == run.config.model.precision:
        return run
    model = dataclasses.replace(run.config.model, precision=precision)
    config = dataclasses.replace(run.config, model=model)
    return prepare(config, run.mesh, optimizer=run.optimizer)


def first_state(run: Prepared, job: Job) -> State:
    """The state before the first step: all arms of a seed begin from the same parameters.

    Some are changed a little, as the arm says.
    """
    arm, state = arms.ARMS[job.arm], run.new_state()
    if arm.perturbed:
        state = state._replace(params=perturbed(state.params, job.seed))
    if arm.shaken:
        state = state._replace(params=shaken(state.params, job.seed, arm.shaken))
    return state


def perturbed(params: Any, seed: int) -> Any:
    """Each parameter moved up or down by one unit in the last place."""

    def moved(key: jax.Array, leaf: jax.Array) -> jax.Array:
        up = jax.random.bernoulli(key, shape=leaf.shape)
        towards = jnp.where(up, jnp.inf, -jnp.inf).astype(leaf.dtype)
        return jnp.nextafter(leaf, towards)

    return _changed(params, seed, moved)


def shaken(params: Any, seed: int, which: int) -> Any:
    """Each parameter changed by a random share of it; the shares have the deviation `SHAKE`."""

    def moved(key: jax.Array, leaf: jax.Array) -> jax.Array:
        normal = jax.random.normal(jax.random.fold_in(key, which), leaf.shape, jnp.float32)
        return (leaf * (1 + SHAKE * normal)).astype(leaf.dtype)

    return _changed(params, seed, moved)


def _changed(params: Any, seed: int, change: Callable[[jax.Array, jax.Array], jax.Array]) -> Any:
    """Each array changed at random, by `change` of a key of its own and the array."""
    leaves, structure = jax.tree.flatten(params)
    changed = [
        jax.device_put(change(jax.random.key(seed * 10_000 + index), leaf), leaf.sharding)
        for index, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, changed)


def say_progress(folder: Path, step: int, of: int, loss: float) -> None:
    """Writes how far a run has come, for the process that started it."""
    writing.replace(folder / "progress.json", json.dumps({"step": step, "of": of, "loss": loss}))


class _Losses:
    """Reads losses a few steps after they were started, and writes the progress of the run."""

    def __init__(self, folder: Path, losses: list[float], steps: int):
        self._folder, self._losses, self._steps = folder, losses, steps
        self._started: list[jax.Array] = []
        self._said = 0.0

    def take(self, loss: jax.Array) -> None:
        self._started.append(loss)
        if len(self._started) > BEHIND:
            self._read()
        if time.perf_counter() - self._said > SAY_EVERY and self._losses:
            self._said = time.perf_counter()
            say_progress(self._folder, len(self._losses), self._steps, self._losses[-1])

    def finish(self) -> None:
        while self._started:
            self._read()

    def _read(self) -> None:
        self._losses.append(float(self._started.pop(0)))


def held_out(
    params: nnx.State, config: TrainConfig, mesh: Mesh, batches: Sequence[Batch]
) -> dict[str, list[float]]:
    """The loss of each batch, under the config's own precision of the forward pass and others."""
    forwards = {"own": config.model.precision, **FORWARDS}
    measured = {
        precision: losses_in(precision, params, config, mesh, batches)
        for precision in set(forwards.values())
    }
    return {name: measured[precision] for name, precision in forwards.items()}


def losses_in(
    precision: Precision,
    params: nnx.State,
    config: TrainConfig,
    mesh: Mesh,
    batches: Sequence[Batch],
) -> list[float]:
    """The loss of each batch, with a forward pass in this precision."""
    model = dataclasses.replace(config.model_on_mesh, precision=precision)
    with jax.set_mesh(mesh):
        step = jax.jit(partial(held_out_step, models.abstract(model, mesh=mesh)[0]))
        return [mean_loss(step(params, batch)) for batch in batches]


def mean_loss(found: HeldOut) -> float:
    """The loss of one batch, for a row."""
    return rounded(float(found.loss) / int(found.labels))


def rounded(value: float) -> float:
    """A number, rounded to six digits."""
    return float(f"{value:.6g}")


if __name__ == "__main__":
    main()
