"""One run: trains one arm from one seed, and evaluates it.

All arms of a seed start from the same parameters and read the same rows in the same order: a
permutation of all rows, taken from the front, so that no token is read twice. A run that is stopped
saves its state in `checkpoint` of its folder, and continues from there.

At the end the held-out loss is measured with the forward pass in the arm's own precision, in BF16
and in COAT_PAPER. Arms that round single operands of products do so in training only.
"""

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from coat_jax import BF16, COAT_PAPER, Precision, models
from coat_jax.models import Loss
from coat_jax.training.checkpoint import Checkpoints
from coat_jax.training.cluster.mesh import make_mesh
from coat_jax.training.config import MeshConfig, TrainConfig
from coat_jax.training.data import Batch
from coat_jax.training.setup import TrainSetup, prepare
from coat_jax.training.step import State, held_out_step
from experiments import row_files
from experiments.loss_study import arms, operands
from experiments.loss_study import text as texts
from experiments.loss_study.arm import (
    Arm,
    Settings,
    optimizer_of,
    precisions_of,
    train_config,
)
from experiments.loss_study.routes import routes_of
from experiments.loss_study.rows import held_out_batches, placed_rows, row_order
from experiments.loss_study.saved import saving
from experiments.row_files import Row, rounded
from experiments.study.study import Job, Stopped
from experiments.study.worker import say

# Besides the precision of the arm itself; "coat" continues with the rounded values.
FORWARDS = {"bf16": BF16, "coat": COAT_PAPER}
BEHIND = 2  # steps that are started before the loss of one is read
REPORT_EVERY = 3.0  # seconds


class Told(NamedTuple):
    """What a job tells of its run."""

    arm: Arm
    size: arms.Size
    settings: Settings
    seed: int
    text: Path


class Trained(NamedTuple):
    """A run after its last step.

    Attributes:
        told: what was trained.
        config: of the run, in the precision of its last step.
        mesh: of one device.
        state: after the last step.
        losses: of all steps.
        seconds: to compile, and to train.
    """

    told: Told
    config: TrainConfig
    mesh: Mesh
    state: State
    losses: list[float]
    seconds: dict[str, float]

    def row(self) -> Row:
        """The fields that every row has."""
        return {
            "losses": [rounded(loss) for loss in self.losses],
            "skipped": int(self.state.skipped),
            "seconds": {name: round(value, 1) for name, value in self.seconds.items()},
            "parents": row_files.parents(),
        }

    def held_out(self) -> dict[str, list[float]]:
        """The held-out loss of each batch, under each precision of the forward pass.

        With experts also what `routes_of` finds.
        """
        told = self.told
        batches = held_out_batches(told.text, self.config.model.vocab, told.settings, self.mesh)
        measured = self.state.params, self.config, self.mesh, batches
        routes = {} if self.config.model.experts is None else routes_of(*measured)
        return held_out(*measured) | routes


def told_by(job: Job) -> Told:
    """What a job tells of its run."""
    (row,) = job.rows
    size, settings = arms.SIZES[row["size"]], Settings(**row["settings"])
    return Told(arms.ARMS[row["arm"]], size, settings, row["seed"], job.work / "text")


def measure(job: Job) -> list[Row]:
    """Makes a run; see `Study`."""
    trained = train(job)
    return [job.rows[0] | trained.row() | {"held_out": trained.held_out()}]


def train(job: Job, *, keep: bool = False) -> Trained:
    """Trains. If the job is stopped before the last step, saves the state and raises `Stopped`.

    Args:
        job: what to train.
        keep: saves the state after the last step, too, so that no later call trains again.
    """
    begin = time.perf_counter()
    told = told_by(job)
    arm, settings = told.arm, told.settings
    config = train_config(arm, told.size, settings, told.seed)
    tokens = texts.load(told.text, "train", config.model.vocab)
    order = row_order(tokens, settings, told.seed)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.set_mesh(mesh))
        saved = stack.enter_context(Checkpoints(job.folder / "checkpoint", keep=1, keep_best=0))
        prepared = prepare(config, mesh, optimizer=optimizer_of(arm, config))
        losses: list[float] = []
        seconds = 0.0
        if not saved.steps():
            state = first_state(prepared, told)
        else:
            _, state, extra = saved.restore(prepared.abstract)
            losses, seconds = extra["losses"], extra["seconds"]
        before = len(losses)
        programs = {}
        if before < settings.steps:
            with operands.rounding(arm.rounded, arm.products), saving(arm.saved):
                programs = {
                    step: _in_precision(precision, prepared).lower().compile()
                    for step, precision in precisions_of(arm, settings.steps).items()
                }
        compiled = time.perf_counter() - begin
        stream = _Losses(job, losses, settings.steps)
        began = time.perf_counter()
        for step in range(before, settings.steps):
            if job.asked:
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
            saved.save(len(losses), state, {"losses": losses, "seconds": seconds}, wait=True)
    if not complete:
        raise Stopped
    return Trained(told, config, mesh, state, losses, {"compile": compiled, "train": seconds})


def _in_precision(precision: Precision, run: TrainSetup) -> TrainSetup:
    """What the steps of a run in this precision are compiled from."""
    if precision == run.config.model.precision:
        return run
    model = dataclasses.replace(run.config.model, precision=precision)
    config = dataclasses.replace(run.config, model=model)
    return prepare(config, run.mesh, optimizer=run.optimizer)


def first_state(run: TrainSetup, told: Told) -> State:
    """The state before the first step: all arms of a seed begin from the same parameters."""
    state = run.new_state()
    if not told.arm.perturbed:
        return state
    return state._replace(params=perturbed(state.params, told.seed))


def perturbed(params: Any, seed: int) -> Any:
    """Each parameter moved up or down by one unit in the last place."""
    leaves, structure = jax.tree.flatten(params)
    changed = []
    for index, leaf in enumerate(leaves):
        up = jax.random.bernoulli(jax.random.key(seed * 10_000 + index), shape=leaf.shape)
        towards = jnp.where(up, jnp.inf, -jnp.inf).astype(leaf.dtype)
        changed.append(jax.device_put(jnp.nextafter(leaf, towards), leaf.sharding))
    return jax.tree.unflatten(structure, changed)


class _Losses:
    """Reads losses a few steps after they were started, and reports the progress of the run."""

    def __init__(self, job: Job, losses: list[float], steps: int):
        self._job, self._losses, self._steps = job, losses, steps
        self._started: list[jax.Array] = []
        self._said = 0.0

    def take(self, loss: jax.Array) -> None:
        self._started.append(loss)
        if len(self._started) > BEHIND:
            self._read()
        if time.perf_counter() - self._said > REPORT_EVERY and self._losses:
            self._said = time.perf_counter()
            say(self._job, f"{len(self._losses)}/{self._steps} {self._losses[-1]:.3f}")

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


def mean_loss(found: Loss) -> float:
    """The loss of one batch, for a row."""
    return rounded(float(found.sum) / int(found.count))
