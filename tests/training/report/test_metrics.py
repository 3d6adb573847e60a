"""metrics.jsonl reads like an undisturbed run, whatever happened to it."""

import errno
import json
import math
import resource
import sys
from contextlib import closing
from pathlib import Path
from unittest import mock

import jax
import pytest

from coat_jax.training.report import metrics
from coat_jax.training.report.metrics import Metrics
from coat_jax.writing import DiskFull


def record(step):
    return {"step": step, "tokens": 64 * step, "loss": 1 / step, "phase": "warm-up"}


def run(folder, steps, **options):
    written = Metrics(folder, config={"seed": 1}, **{"note": lambda text: None, **options})
    for step in steps:
        written.write(record(step))
    written.close()


def lines(folder):
    return (folder / metrics.FILE).read_text("utf-8").splitlines()


def test_every_line_is_a_record_and_is_there_at_once(tmp_path):
    """NaN and infinity are null, for any reader."""
    records = [record(1), {"step": 2, "nan": math.nan, "inf": math.inf, "less": -math.inf}]
    with closing(Metrics(tmp_path, config={})) as written:
        for one in records:
            written.write(one)
            assert len(lines(tmp_path)) == one["step"]
    assert lines(tmp_path)[1] == '{"step": 2, "nan": null, "inf": null, "less": null}'
    infinite = {"step": 2, "nan": None, "inf": None, "less": None}
    assert list(metrics.read(tmp_path / metrics.FILE)) == [record(1), infinite]


def test_a_resumed_run_reads_like_an_undisturbed_one(tmp_path):
    disturbed, undisturbed = tmp_path / "a", tmp_path / "b"
    for folder in (disturbed, undisturbed):
        folder.mkdir()
    run(undisturbed, range(1, 10))
    run(disturbed, range(1, 8))
    with (disturbed / metrics.FILE).open("a") as file:
        file.write('{"step": 8, "lo')  # killed here, after the checkpoint of step 4
    run(disturbed, range(5, 10), resume_step=4)
    assert lines(disturbed) == lines(undisturbed)
    run(disturbed, [], resume_step=9)
    assert {path.name for path in disturbed.iterdir()} == {metrics.FILE, "metrics.removed.jsonl"}


@pytest.mark.parametrize("kept", [0, 4])
def test_no_record_of_a_run_without_its_checkpoints_is_erased(tmp_path, kept):
    notes, removed = [], []
    for first, last in ((1, 7), (kept + 1, 6)):
        run(tmp_path, range(first, last + 1), resume_step=kept)
        removed += lines(tmp_path)[kept:]
    run(tmp_path, [], resume_step=kept, note=notes.append)
    assert len(lines(tmp_path)) == kept
    assert (tmp_path / "metrics.removed.jsonl").read_text().splitlines() == removed
    (note,) = notes
    assert f"after step {kept}: {6 - kept} later or damaged lines of {tmp_path}" in note


@pytest.mark.parametrize("move", [Path.unlink, lambda path: path.rename(f"{path}.1")])
def test_records_go_to_a_new_file_if_theirs_is_moved_away(tmp_path, move):
    with closing(Metrics(tmp_path, config={})) as written:
        written.write(record(1))
        move(tmp_path / metrics.FILE)
        for step in (2, 3):
            written.write(record(step))
    assert list(map(json.loads, lines(tmp_path))) == [record(2), record(3)]


def test_a_repair_that_is_interrupted_leaves_the_old_file(tmp_path, monkeypatch):
    run(tmp_path, range(1, 8))
    before = lines(tmp_path)
    monkeypatch.setattr(Path, "replace", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, [], resume_step=2)
    assert lines(tmp_path) == before


@pytest.mark.parametrize("line", [b"{oops", b"[1]", b"{}", b"\0\0\0", b"\xff", b'{"step": 1.5}'])
def test_a_damaged_line_is_left_out_and_moved_away_by_resuming(tmp_path, line):
    path, notes = tmp_path / metrics.FILE, []
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
    assert list(metrics.read(path)) == [{"step": 1}, {"step": 3}]
    run(tmp_path, [4], resume_step=3, note=notes.append)
    assert [json.loads(line)["step"] for line in lines(tmp_path)] == [1, 3, 4]
    assert (tmp_path / "metrics.removed.jsonl").read_bytes() == line + b"\n"
    (note,) = notes
    assert "1 later or damaged line of" in note


def test_a_last_line_without_its_end_stays_if_it_is_a_record(tmp_path):
    (tmp_path / metrics.FILE).write_bytes(b'{"step": 1}\n{"step": 4}')
    run(tmp_path, [5], resume_step=4)
    assert [json.loads(line)["step"] for line in lines(tmp_path)] == [1, 4, 5]


def test_only_the_main_process_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    run(tmp_path, [1], writers=("tensorboard", "wandb"))
    assert list(tmp_path.iterdir()) == []


def events(folder):
    """The scalars in the event files, in order, as (step, name, value)."""
    from tensorboardX.proto import event_pb2  # which imports torch, where there is one

    found = []
    for path in sorted((folder / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            event = event_pb2.Event.FromString(data[12 : 12 + size])
            found += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
            found += [(event.step, "purge", None)] * (event.session_log.status == 1)
            data = data[16 + size :]
    return found


def test_tensorboard_gets_every_number_and_forgets_what_a_resumed_run_repeats(tmp_path):
    run(tmp_path, [1, 2], writers=("tensorboard",))
    losses, tokens = (
        [(1, "loss", 1.0), (2, "loss", 0.5)],
        [(1, "tokens", 64.0), (2, "tokens", 128.0)],
    )
    assert sorted(events(tmp_path)) == sorted([*losses, *tokens, (1, "purge", None)])
    run(tmp_path, [2], writers=("tensorboard",), resume_step=1)
    assert (2, "purge", None) in events(tmp_path)


def test_wandb_finds_a_resumed_run_again(tmp_path, monkeypatch):
    wandb = mock.MagicMock()
    wandb.init.return_value.id = "made-up"
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    run(tmp_path, [1], writers=("wandb",))
    run(tmp_path, [2], writers=("wandb",), resume_step=1)
    first, second = (call.kwargs for call in wandb.init.call_args_list)
    assert first["config"] == {"seed": 1}
    assert (first["id"], second["id"]) == (None, "made-up")
    log, finish = wandb.init.return_value.log, wandb.init.return_value.finish
    assert log.call_args_list[0] == mock.call(
        {"tokens": 64, "loss": 1.0, "phase": "warm-up"}, step=1
    )
    assert finish.call_count == 2


@pytest.mark.parametrize("room", range(0, 60, 7))
def test_a_full_disk_takes_no_record_that_was_written(tmp_path, room):
    """Where the kernel lets files have only so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with closing(Metrics(tmp_path, config={})) as written:
        (tmp_path / metrics.FILE).touch()
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
        try:
            for step in range(1, 6):
                written.write({"step": step})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert isinstance(written.failure, DiskFull)
        whole = [record["step"] for record in metrics.read(tmp_path / metrics.FILE)]
        assert whole == list(range(1, 1 + (room + 1) // 12))  # the last without a newline


def test_records_are_on_the_disk_after_sync(tmp_path, monkeypatch):
    """And an error of the disk is seen by then."""
    flush = mock.Mock()
    monkeypatch.setattr(metrics.writing, "flush", flush)
    with closing(Metrics(tmp_path, config={})) as written:
        written.sync()  # nothing yet
        written.write(record(1))
        written.sync()
        flush.assert_called_once_with(tmp_path / metrics.FILE)
        flush.side_effect = OSError(errno.EIO, "Input/output error")
        written.sync()
        assert "could not be written" in str(written.failure)
