"""metrics.jsonl reads like an undisturbed run, whatever happened to it."""

import json
import math
import sys
import types
from contextlib import closing
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

from coat_jax.training import distributed, metrics
from coat_jax.training.metrics import Metrics


def record(step):
    return {"step": step, "tokens": 64 * step, "loss": 1 / step, "phase": "warm-up"}


def run(folder, steps, **options):
    written = Metrics(folder, config={"seed": 1}, **options)
    for step in steps:
        written.write(record(step))
    written.close()


def lines(folder):
    return (folder / metrics.FILE).read_text("utf-8").splitlines()


def test_every_line_is_a_record_and_is_there_at_once(tmp_path):
    with closing(Metrics(tmp_path, config={})) as written:
        for step in (1, 2):
            written.write(record(step))
            assert len(lines(tmp_path)) == step
    assert json.loads(lines(tmp_path)[1]) == record(2)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_null_for_any_reader(tmp_path, loss):
    with closing(Metrics(tmp_path, config={})) as written:
        written.write({"step": 1, "loss": loss})
    assert lines(tmp_path) == ['{"step": 1, "loss": null}']
    assert list(metrics.read(tmp_path / metrics.FILE)) == [{"step": 1, "loss": None}]


def test_a_resumed_run_reads_like_an_undisturbed_one(tmp_path):
    disturbed, undisturbed = tmp_path / "a", tmp_path / "b"
    disturbed.mkdir()
    undisturbed.mkdir()
    run(undisturbed, range(1, 10))
    run(disturbed, range(1, 8))
    with (disturbed / metrics.FILE).open("a") as file:
        file.write('{"step": 8, "lo')  # killed here, after the checkpoint of step 4
    run(disturbed, range(5, 10), resume_step=4)
    assert lines(disturbed) == lines(undisturbed)
    assert [path.name for path in disturbed.iterdir()] == [metrics.FILE]


def test_a_run_that_resumes_from_nothing_begins_again(tmp_path):
    run(tmp_path, range(1, 8))
    run(tmp_path, range(1, 3), resume_step=0)
    assert len(lines(tmp_path)) == 2


def test_a_cut_that_is_interrupted_leaves_the_old_file(tmp_path, monkeypatch):
    run(tmp_path, range(1, 8))
    before = lines(tmp_path)

    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, [], resume_step=2)
    assert lines(tmp_path) == before


def test_a_new_run_does_not_write_over_another(tmp_path):
    run(tmp_path, [1])
    with pytest.raises(FileExistsError, match="records of an earlier run: resume it, or choose"):
        run(tmp_path, [1])
    assert len(lines(tmp_path)) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [("{oops", r"metrics\.jsonl:2 is not JSON"), ("[1]", ":2 is no record"), ("{}", "no step")],
)
def test_a_damaged_line_is_named(tmp_path, line, message):
    (tmp_path / metrics.FILE).write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(ValueError, match=message):
        run(tmp_path, [4], resume_step=3)
    assert len(lines(tmp_path)) == 3


@pytest.mark.parametrize("broken", [{"loss": 1.0}, {"step": 1.5}, {"step": None}])
def test_a_record_without_a_step_is_refused(tmp_path, broken):
    with (
        closing(Metrics(tmp_path, config={})) as written,
        pytest.raises(ValueError, match="needs a whole number as its step"),
    ):
        written.write(broken)


def test_only_the_main_process_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(distributed, "is_main", lambda: False)
    run(tmp_path, [1], writers=("tensorboard", "wandb"))
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_writer_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match="'tensorbord': tensorboard, wandb"):
        Metrics(tmp_path, writers=("tensorbord",), config={})


@pytest.mark.parametrize(
    ("writer", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")]
)
def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch, writer, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"needs {package}: pip install 'coat_jax\[{writer}\]'"):
        Metrics(tmp_path, writers=(writer,), config={})
    assert list(tmp_path.iterdir()) == []


def events(folder):
    """The scalars in the event files, in order, as (step, name, value)."""
    found = []
    for path in sorted((folder / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            assert int.from_bytes(data[8:12], "little") == masked_crc32c(data[:8])
            event = Event.FromString(data[12 : 12 + size])
            found += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
            found += [(event.step, "purge", None)] * (event.session_log.status == 1)
            data = data[16 + size :]
    return found


def test_tensorboard_gets_every_number(tmp_path):
    run(tmp_path, [1, 2], writers=("tensorboard",))
    assert [event for event in events(tmp_path) if event[1] == "loss"] == [
        (1, "loss", 1.0),
        (2, "loss", 0.5),
    ]
    assert {name for _, name, _ in events(tmp_path)} == {"loss", "tokens"}


def test_tensorboard_forgets_what_a_resumed_run_repeats(tmp_path):
    run(tmp_path, [1, 2, 3], writers=("tensorboard",))
    run(tmp_path, [2], writers=("tensorboard",), resume_step=1)
    assert (2, "purge", None) in events(tmp_path)


class FakeWandB(types.ModuleType):
    """What of wandb is used; its runs stay in `runs`."""

    def __init__(self):
        super().__init__("wandb")
        self.runs = []

    def init(self, **options):
        run = types.SimpleNamespace(id=options["id"] or "made-up", options=options, logged=[])
        run.log = lambda values, step: run.logged.append((step, values))
        run.finish = lambda: run.logged.append("finished")
        self.runs.append(run)
        return run


def test_wandb_finds_a_resumed_run_again(tmp_path, monkeypatch):
    wandb = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    run(tmp_path, [1], writers=("wandb",))
    run(tmp_path, [2], writers=("wandb",), resume_step=1)
    first, second = wandb.runs
    assert first.options["config"] == {"seed": 1}
    assert first.logged == [(1, {"tokens": 64, "loss": 1.0, "phase": "warm-up"}), "finished"]
    assert (first.options["id"], second.options["id"]) == (None, "made-up")
