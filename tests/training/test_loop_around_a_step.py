"""What the loop does around a step, with a step that only counts: nothing is compiled."""

import functools
import io
import json
import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console
from train_cases import ONE, mesh_of, small

from coat_jax import models, writing
from coat_jax.errors import UserError
from coat_jax.training import loop, setup
from coat_jax.training.checkpoint import Checkpoints
from coat_jax.training.config import CheckpointConfig, EvaluationConfig, MeshConfig
from coat_jax.training.report import metrics
from coat_jax.training.report.metrics import PACKAGES, Metrics
from coat_jax.training.step import Report
from coat_jax.writing import DiskFull

STEPS = 8
ALL = list(range(1, STEPS + 1))


class Counting:
    """Stands in for the compiled step.

    Attributes:
        compiled: the programs that were asked for.
        seen: the sum of the tokens of each step.
                after: what happens when a step has been taken.
    """

    def __init__(self):
        self.compiled, self.seen, self.after = [], {}, {}

    def compile(self, setup, console, what):
        self.compiled.append(what)
        return self

    def __call__(self, state, batch):
        step = int(state.step) + 1
        self.seen[step] = int(np.sum(batch.tokens))
        self.after.get(step, lambda: None)()
        loss = jnp.float32(1 / step)
        report = Report(loss, loss, jnp.float32(0), jnp.int32(9), state.skipped)
        return state._replace(step=state.step + 1), report


class HeldOut:
    """Its loss is another one each time."""

    def __init__(self, *arguments):
        self.losses = iter((2.5, 2.25, 2.125))

    def measure(self, params):
        return next(self.losses), {}


abstract_once = functools.cache(models.abstract)


def zeros(setup):
    return jax.tree.map(
        lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding), setup.abstract
    )


@pytest.fixture
def step(monkeypatch):
    """Runs count their steps and do nothing else; their model is traced once for all."""
    counting = Counting()
    monkeypatch.setattr(models, "abstract", abstract_once)
    monkeypatch.setattr(setup, "_compile", counting.compile)
    monkeypatch.setattr(setup.TrainSetup, "new_state", zeros)
    monkeypatch.setattr(loop, "Evaluation", HeldOut)
    monkeypatch.setattr(loop, "make_mesh", lambda _: mesh_of(ONE))  # checkpoints are sooner written
    return counting


@pytest.fixture
def config(tmp_path):
    return small(
        model={"layers": 1},
        optimizer={"name": "adamw"},
        out=str(tmp_path / "run"),
        total_steps=STEPS,
        checkpoint=CheckpointConfig(every=2, keep=9),
        mesh=MeshConfig(),
    )


def train(config):
    """The outcome and what was printed."""
    file = io.StringIO()
    return loop.train(config, Console(file=file, width=200)), file.getvalue()


def records(config):
    lines = (Path(config.out) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def steps(config):
    return [record["step"] for record in records(config)]


def saved(config):
    """The record.json of each checkpoint, by step."""
    folder = Path(config.out) / "checkpoints"
    paths = sorted(folder.glob("*/record.json"))
    return {int(path.parent.name): json.loads(path.read_text()) for path in paths}


def test_a_missing_package_is_named_before_anything_is_compiled(config, monkeypatch):
    monkeypatch.setitem(sys.modules, PACKAGES["wandb"], None)
    with pytest.raises(UserError, match="The wandb writer needs"):
        train(replace(config, writers=("wandb",)))
    assert not Path(config.out).exists()


def test_a_checkpoint_has_the_held_out_loss_of_its_step_or_none(step, config):
    """Not that of an evaluation before it."""
    train(replace(config, evaluation=EvaluationConfig(every=4)))
    losses = {step: record["loss"] for step, record in saved(config).items()}
    assert losses == {2: None, 4: 2.5, 6: None, 8: 2.25}


def test_a_signal_saves_and_stops(step, config):
    """A run past its start in BF16 compiles no program for it, with an older checkpoint left."""
    config = replace(config, bf16_steps=3)
    step.after[5] = lambda: os.kill(os.getpid(), signal.SIGHUP)
    outcome, _ = train(config)
    assert (outcome.step, outcome.stopped) == (5, True)
    assert list(saved(config)) == [2, 4, 5]
    step.after.clear()
    step.compiled.clear()
    assert train(config)[0].step == STEPS
    assert step.compiled == ["the step"]
    assert steps(config) == ALL
    seen = dict(step.seen)
    train(replace(config, out=f"{config.out}_undisturbed"))
    assert step.seen == seen  # the same batches


def test_ctrl_c_ends_a_run_at_once_and_it_begins_anew_if_nothing_was_saved(step, config):
    step.after[1] = lambda: os.kill(os.getpid(), signal.SIGINT)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
    try:
        with pytest.raises(KeyboardInterrupt):
            train(config)
    finally:
        signal.signal(signal.SIGINT, before)
    assert saved(config) == {}
    step.after.clear()
    assert train(config)[0].step == STEPS
    assert steps(config) == ALL


@pytest.mark.parametrize(("free", "file", "last"), [(None, "metrics", 6), (0, "checkpoint", 4)])
def test_a_full_disk_saves_what_fits_and_the_run_continues(step, config, free, file, last):
    """The record of step 5 cannot be written; the checkpoint of step 6 can if there is room."""
    usage = writing.shutil.disk_usage("/")
    usage = usage if free is None else usage._replace(free=free)

    def open_full(path, *how, opened=Path.open, **more):
        return opened(Path("/dev/full") if path.name == metrics.FILE else path, *how, **more)

    def fill():
        full.setattr(Path, "open", open_full)
        full.setattr(writing.shutil, "disk_usage", lambda _: usage)

    step.after[5] = fill
    with pytest.MonkeyPatch.context() as full, pytest.raises(DiskFull, match=f"{file}.* not fit"):
        train(config)
    assert steps(config) == [1, 2, 3, 4]
    assert max(saved(config)) == last
    step.after.clear()
    _, text = train(config)
    assert f"Resumes after step {last}" in text
    assert steps(config) == [1, 2, 3, 4, *range(last + 1, STEPS + 1)]


def test_a_damaged_checkpoint_is_named_and_the_one_before_used(step, config):
    train(config)
    undisturbed = records(config)
    files = (Path(config.out) / "checkpoints" / str(STEPS)).rglob("d/*")
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    _, text = train(config)
    assert f"checkpoints/{STEPS} is damaged: the checksum of state/" in text
    assert f"Resumes after step {STEPS - 2} of {STEPS}." in text
    assert [record["loss"] for record in records(config)] == [r["loss"] for r in undisturbed]


def test_a_run_resumes_without_the_folder_that_it_began_from(step, config, tmp_path):
    source = tmp_path / "source"
    models.hf.save(source, models.create(config.model, seed=1))
    config = replace(config, init_from=str(source))
    train(replace(config, total_steps=2))
    shutil.rmtree(source)
    assert train(config)[0].step == STEPS
    step.compiled.clear()
    another = replace(config, out=str(tmp_path / "another"))
    with pytest.raises(UserError, match="source"):
        train(another)
    shutil.rmtree(Path(config.out) / "checkpoints")
    with pytest.raises(UserError, match="no checkpoint"):
        train(replace(another, init_from=config.out))
    assert step.compiled == []
    assert not Path(another.out).exists()


def test_a_complete_run_says_so_and_compiles_nothing(step, config, capsys):
    """From Python progress goes to standard output."""
    assert loop.train(config).step == STEPS
    said = capsys.readouterr().out
    assert "Trains on" in said
    assert "The run is complete" not in said
    assert list(saved(config)) == [2, 4, 6, 8]
    step.compiled.clear()
    _, text = train(config)
    assert "The run is complete. To train it further, raise --total_steps." in text
    assert step.compiled == []


def test_a_run_of_a_transformation_continues_and_another_one_is_refused(step, config):
    """Before anything is written: config.json says still what was run."""
    config = replace(config, optimizer=optax.lion, metrics={"one": lambda step: 1.0})
    step.after[3] = lambda: os.kill(os.getpid(), signal.SIGTERM)
    train(config)
    step.after.clear()
    before = (Path(config.out) / "config.json").read_text()
    with pytest.raises(
        UserError, match=r"holds the state of another .*Only stored: .*'moments/inner"
    ):
        train(replace(config, optimizer=optax.adan))
    with pytest.raises(UserError, match="has taken 3 steps, and total_steps=2"):
        train(replace(config, total_steps=2))
    assert (Path(config.out) / "config.json").read_text() == before
    assert train(config)[0].step == STEPS


def test_records_are_on_the_disk_before_the_checkpoint_that_follows_them(step, config, monkeypatch):
    """A power failure must not leave a checkpoint whose records are lost."""
    order = []
    sync, save = Metrics.sync, Checkpoints.save

    def watched(function, *arguments, **options):
        order.append((function.__name__, len(records(config))))
        return function(*arguments, **options)

    monkeypatch.setattr(Metrics, "sync", lambda *a, **k: watched(sync, *a, **k))
    monkeypatch.setattr(Checkpoints, "save", lambda *a, **k: watched(save, *a, **k))
    train(replace(config, checkpoint=CheckpointConfig(every=4)))
    assert order == [("sync", 4), ("save", 4), ("sync", 8), ("save", 8)]
