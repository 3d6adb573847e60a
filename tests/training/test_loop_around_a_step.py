"""What the loop does around a step, with a step that only counts: nothing is compiled."""

import dataclasses
import errno
import functools
import io
import json
import os
import shutil
import signal
import sys
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
from coat_jax.training import loop, preparation, programs
from coat_jax.training.checkpoint import Checkpoints
from coat_jax.training.config import CheckpointConfig, EvaluationConfig, MeshConfig
from coat_jax.training.data import DataConfig
from coat_jax.training.report.metrics import JSONLines, Metrics
from coat_jax.training.report.recorder import Diverged
from coat_jax.training.report.writers import PACKAGES
from coat_jax.training.step import Report
from coat_jax.writing import DiskFull

STEPS = 8


class Counting:
    """Stands in for the compiled step.

    Attributes:
        skipped: the steps that are.
        after: what happens when a step has been taken.
    """

    def __init__(self):
        self.skipped = set()
        self.after = {}

    def __call__(self, state, batch):
        step = int(state.step) + 1
        skipped = state.skipped + (step in self.skipped)
        self.after.get(step, lambda: None)()
        loss = jnp.float32(np.nan if step in self.skipped else 1 / step)
        report = Report(loss, loss, jnp.float32(0), jnp.int32(9), skipped)
        return state._replace(step=state.step + 1, skipped=skipped), report


abstract_once = functools.cache(models.abstract)


def count_steps(monkeypatch):
    """Lets runs count their steps and do nothing else; their model is traced once for all."""
    counting = Counting()

    def zeros(config, optimizer, mesh):
        _, abstract = preparation.abstract_state(config, optimizer, mesh)
        return jax.tree.map(
            lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding), abstract
        )

    class HeldOut:
        """Its loss is another one each time."""

        def __init__(self, *arguments):
            self.losses = iter((2.5, 2.25, 2.125))

        def loss(self, params):
            return next(self.losses)

    monkeypatch.setattr(models, "abstract", abstract_once)
    monkeypatch.setattr(programs, "_compile", lambda *arguments, **options: counting)
    monkeypatch.setattr(preparation, "new_state", zeros)
    monkeypatch.setattr(loop, "Evaluation", HeldOut)
    monkeypatch.setattr(loop, "make_mesh", lambda _: mesh_of(ONE))  # checkpoints are sooner written
    return counting


@pytest.fixture
def step(monkeypatch):
    return count_steps(monkeypatch)


def config_of(folder):
    return small(
        model={"layers": 1},
        optimizer={"name": "adamw"},
        out=str(folder),
        total_steps=STEPS,
        checkpoint=CheckpointConfig(every=2, keep=9),
        mesh=MeshConfig(),
    )


@pytest.fixture
def config(tmp_path):
    return config_of(tmp_path / "run")


def train(config):
    """The outcome and what was printed."""
    file = io.StringIO()
    return loop.train(config, Console(file=file, width=200)), file.getvalue()


def test_from_python_progress_goes_to_standard_output(step, config, capsys):
    assert loop.train(config).step == STEPS
    assert "Trains on" in capsys.readouterr().out


def records(config):
    lines = (Path(config.out) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def saved(config):
    """The record.json of each checkpoint, by step."""
    folder = Path(config.out) / "checkpoints"
    paths = sorted(folder.glob("*/record.json"))
    return {int(path.parent.name): json.loads(path.read_text()) for path in paths}


def replace(config, **changes):
    return dataclasses.replace(config, **changes)


@pytest.mark.parametrize("writer", ["tensorboard", "wandb"])
def test_a_missing_package_is_named_before_anything_is_compiled(config, monkeypatch, writer):
    monkeypatch.setitem(sys.modules, PACKAGES[writer], None)
    with pytest.raises(UserError, match=f"The {writer} writer needs"):
        train(replace(config, writers=(writer,)))
    assert not Path(config.out).exists()


def test_a_checkpoint_has_the_held_out_loss_of_its_step_or_none(step, config):
    """Not that of an evaluation before it."""
    train(replace(config, evaluation=EvaluationConfig(every=4)))
    losses = {step: record["loss"] for step, record in saved(config).items()}
    assert losses == {2: None, 4: 2.5, 6: None, 8: 2.25}


def test_a_run_that_diverges_ends_with_a_code_of_its_own(step, config):
    step.skipped = set(range(4, 9))
    with pytest.raises(Diverged, match="last 3 steps, up to step 6"):
        train(replace(config, max_skipped_steps=3))
    assert [record["step"] for record in records(config)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_saves_and_stops(step, config, number):
    step.after[3] = lambda: os.kill(os.getpid(), number)
    outcome, _ = train(config)
    assert (outcome.step, outcome.stopped) == (3, True)
    assert list(saved(config)) == [2, 3]
    step.after.clear()
    assert train(config)[0].step == STEPS
    assert [record["step"] for record in records(config)] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("fits", [True, False])
def test_a_full_disk_saves_what_fits_and_nothing_is_lost(step, config, fits):
    """The metrics cannot be written any more; the checkpoint, if it can, has their records."""
    usage = writing.shutil.disk_usage("/")
    usage = usage if fits else usage._replace(free=0)

    def no_space(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    def fill():
        full.setattr(JSONLines, "_append", no_space)
        full.setattr(writing.shutil, "disk_usage", lambda _: usage)

    step.after[5] = fill
    with (
        pytest.MonkeyPatch.context() as full,
        pytest.raises(DiskFull, match=r"metrics\.jsonl does not fit"),
    ):
        train(config)
    assert [record["step"] for record in records(config)] == [1, 2, 3, 4][: len(records(config))]
    last = max(saved(config))
    assert last in ((5, 6) if fits else (4,))
    step.after.clear()
    _, text = train(config)
    assert f"Resumes after step {last}" in text
    assert [record["step"] for record in records(config)] == list(range(1, STEPS + 1))


def test_a_full_disk_that_takes_no_checkpoint_leaves_the_last_one(step, config, monkeypatch):
    usage = writing.shutil.disk_usage("/")
    full = usage._replace(free=0)
    step.after[3] = lambda: monkeypatch.setattr(writing.shutil, "disk_usage", lambda _: full)
    with pytest.raises(DiskFull, match="step 4 does not fit"):
        train(config)
    assert list(saved(config)) == [2]
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda _: usage)
    step.after.clear()
    assert train(config)[0].step == STEPS
    assert [record["step"] for record in records(config)] == list(range(1, STEPS + 1))


def test_a_run_that_is_past_its_start_in_bf16_compiles_no_program_for_it(step, config, monkeypatch):
    """Although an older checkpoint of it is left."""
    config = replace(config, bf16_steps=3)
    step.after = {6: lambda: os.kill(os.getpid(), signal.SIGTERM)}
    train(config)
    assert {2, 6} <= saved(config).keys()
    compiled = []

    def compile_(prepared, console, what, **options):
        compiled.append(what)
        return step

    monkeypatch.setattr(programs, "_compile", compile_)
    assert train(config)[0].step == STEPS
    assert compiled == ["the step"]


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
    with pytest.raises(UserError, match="source"):
        train(replace(config, out=str(tmp_path / "another")))


def cut_off(source, config):
    models.hf.save(source, models.create(config.model, seed=1))
    (file,) = source.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])


def without_a_checkpoint(source, config):
    train(replace(config, out=str(source), total_steps=2))
    shutil.rmtree(source / "checkpoints")


@pytest.mark.parametrize(
    ("damage", "message"), [(cut_off, "safetensors"), (without_a_checkpoint, "no checkpoint")]
)
def test_parameters_to_begin_from_are_missed_before_a_step_is_compiled(
    step, config, tmp_path, monkeypatch, damage, message
):
    damage(tmp_path / "source", config)
    compiled = []
    monkeypatch.setattr(programs, "_compile", lambda *arguments, **_: compiled.append(arguments))
    with pytest.raises(UserError, match=message):
        train(replace(config, init_from=str(tmp_path / "source"), out=str(tmp_path / "new")))
    assert compiled == []
    assert not (tmp_path / "new").exists()


def test_a_complete_run_says_so_and_compiles_nothing(step, config, monkeypatch):
    assert "The run is complete" not in train(config)[1]
    compiled = []
    monkeypatch.setattr(programs, "_compile", lambda *arguments, **_: compiled.append(arguments))
    assert "The run is complete. To train it further, raise --total_steps." in train(config)[1]
    assert compiled == []


def test_checkpoints_left_by_a_killed_run_are_pruned_at_the_next_start(step, config):
    train(config)
    assert list(saved(config)) == [2, 4, 6, 8]
    train(replace(config, checkpoint=CheckpointConfig(every=2, keep=2)))
    assert list(saved(config)) == [6, 8]


def test_a_run_says_how_many_conversations_are_cut(step, config, tmp_path):
    def talk(length):
        said = [("user", "Hi"), ("assistant", "a" * length)]
        return json.dumps({"messages": [{"role": r, "content": c} for r, c in said]})

    path = tmp_path / "talk.jsonl"
    path.write_text("\n".join(talk(n) for n in (1, 2, 3, 100, 200, 300, 4, 5, 6, 7)))
    _, text = train(
        replace(
            config,
            total_steps=1,
            sequence_length=64,
            data=DataConfig(train=(str(path),), kind="chat"),
        )
    )
    assert "rows of 64; truncated to that length: 3 documents; each batch has 16 rows" in text


def lion(schedule):
    return optax.lion(schedule)


def test_a_run_of_a_transformation_continues_and_another_one_is_refused(step, config, monkeypatch):
    """Before anything is written: config.json says still what was run."""
    config = replace(config, optimizer=lion, metrics={"one": lambda step: 1.0})
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


def test_the_run_seed_reaches_everything_that_is_random(step, config, monkeypatch):
    seeds = {}

    def spy(module, name):
        function = getattr(module, name)

        def wrapped(config, *arguments):
            seeds[name] = config.seed
            return function(config, *arguments)

        monkeypatch.setattr(module, name, wrapped)

    spy(loop, "open_data")
    spy(preparation, "make_optimizer")
    spy(preparation, "new_state")
    train(replace(config, total_steps=1, seed=7))
    assert seeds == {"open_data": 7, "make_optimizer": 7, "new_state": 7}


def test_records_are_on_the_disk_before_the_checkpoint_that_follows_them(step, config, monkeypatch):
    """A power failure must not leave a checkpoint whose records are lost."""
    order = []

    def watched(owner, name):
        function = getattr(owner, name)

        def wrapped(self, *arguments, **options):
            order.append((name, len(records(config))))
            return function(self, *arguments, **options)

        monkeypatch.setattr(owner, name, wrapped)

    watched(Metrics, "sync")
    watched(Checkpoints, "save")
    train(replace(config, checkpoint=CheckpointConfig(every=4)))
    assert order == [("sync", 4), ("save", 4), ("sync", 8), ("save", 8)]


@pytest.fixture(scope="module")
def run_of_step_4(tmp_path_factory):
    """A run with the records of all steps, whose newest checkpoint is of step 4."""
    folder = tmp_path_factory.mktemp("step_4") / "run"
    with pytest.MonkeyPatch.context() as monkeypatch:
        count_steps(monkeypatch)
        train(replace(config_of(folder), checkpoint=CheckpointConfig(every=4)))
    shutil.rmtree(folder / "checkpoints" / "8")
    return folder


@pytest.mark.parametrize(
    ("left", "lost"),
    [
        (8, None),
        (5, None),
        (4, None),
        (3, "steps 4 to 4"),
        (1, "steps 2 to 4"),
        (0, "steps 1 to 4"),
    ],
)
def test_records_that_were_lost_are_noted(step, config, run_of_step_4, left, lost):
    """Those before the newest checkpoint do not come again."""
    shutil.copytree(run_of_step_4, config.out)
    path = Path(config.out) / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:left]))
    _, text = train(replace(config, checkpoint=CheckpointConfig(every=4)))
    assert ("it has lost the records of" in text) == (lost is not None)
    assert (lost or "") in text
    expected = [*range(1, min(left, 4) + 1), *range(5, STEPS + 1)]
    assert [record["step"] for record in records(config)] == expected
