"""A folder holds one run: which one is known while any copy of its config is left."""

import json
import os
import shutil
from pathlib import Path

import pytest
from train_cases import small

from coat_jax import manifest
from coat_jax.errors import UserError
from coat_jax.training.checkpoint.weights import read_config_json
from coat_jax.training.config import to_json
from coat_jax.training.run_folder import RunFolder
from coat_jax.writing import NotWritten


def claim(config, note=print, end_of_text=None):
    """The changes; the folder is released again."""
    folder = RunFolder(config, note)
    try:
        changed = folder.claim()
        folder.write_config(end_of_text=end_of_text)
        return changed
    finally:
        folder.release()


def write_checkpoint(out, step, config):
    """As `Checkpoints` leaves it, with a state of one file."""
    folder = Path(out) / "checkpoints" / str(step)
    (folder / "state").mkdir(parents=True)
    (folder / "state" / "arrays").write_text("numbers")
    record = {"step": step, "loss": None, "extra": {"config": to_json(config)}}
    (folder / "record.json").write_text(json.dumps(record))
    manifest.write(folder)
    return folder


@pytest.fixture
def out(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def saved(out):
    """A run of batch 16 with two checkpoints; its config.json is as it should be."""
    config = small(out=str(out))
    claim(config)
    for step in (1, 2):
        write_checkpoint(out, step, config)
    return config


BROKEN = {
    "missing": lambda path: path.unlink(),
    "cut off": lambda path: path.write_text(path.read_text()[:100]),
    "empty": lambda path: path.write_text(""),
    "no object": lambda path: path.write_text("[1]"),
    "no text": lambda path: path.write_bytes(b"\xff\x00"),
    "deep": lambda path: path.write_text("[" * 100_000),
    "unreadable": lambda path: (path.unlink(), path.symlink_to("/proc/self/mem")),  # EIO
    "edited": lambda path: path.write_text(path.read_text().replace('_size": 16', '_size": 32')),
}


@pytest.mark.parametrize("harm", BROKEN.values(), ids=BROKEN)
def test_a_config_that_is_broken_is_known_from_the_newest_whole_checkpoint(out, saved, harm):
    whole = read_config_json(out)
    assert not RunFolder(saved, print).begins()
    for path in (out / "config.json", out / "checkpoints" / "2" / "record.json"):
        harm(path)
        assert read_config_json(out) == whole
        with pytest.raises(UserError, match="holds another run: global_batch_size was 16, now 32"):
            claim(small(out=str(out), global_batch_size=32))
    assert claim(saved) == []
    assert json.loads((out / "config.json").read_text()) == to_json(saved)


def test_a_damaged_config_without_checkpoints_is_replaced_and_noted(out, saved):
    shutil.rmtree(out / "checkpoints")
    (out / "config.json").write_text('{"model"')
    with pytest.raises(UserError, match="is not JSON: Expecting"):
        read_config_json(out)
    notes = []
    assert claim(saved, notes.append) == []
    (note,) = notes
    assert "config.json is not JSON" in note
    assert "No checkpoint says what was run" in note
    with pytest.raises(UserError, match="global_batch_size was 16, now 32"):
        claim(small(out=str(out), global_batch_size=32))
    (out / "config.json").unlink()
    assert RunFolder(saved, print).begins()
    with pytest.raises(UserError, match=r"neither the folder .* no config\.json in it"):
        read_config_json(out)


def test_a_config_without_an_end_is_replaced(out):
    out.mkdir()
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        (out / "config.json").unlink(missing_ok=True)
        make(out / "config.json")
        assert claim(small(out=str(out))) == []
        assert (out / "config.json").is_file()


def test_a_run_that_has_no_checkpoint_may_begin_from_other_parameters(out, saved):
    """Its first try may have failed for the wrong ones."""
    other = small(out=str(out), init_from="elsewhere")
    with pytest.raises(UserError, match="init_from was None"):
        claim(other)
    shutil.rmtree(out / "checkpoints")
    assert len(claim(other)) == 1


def test_a_folder_with_a_model_that_no_run_wrote_stays_as_it_is(out):
    out.mkdir()
    (out / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    for resume in (True, False):
        with pytest.raises(UserError, match=r"holds a model in Hugging Face's format.*--out"):
            claim(small(out=str(out), resume=resume))
    assert "LlamaForCausalLM" in (out / "config.json").read_text()


def test_fewer_steps_than_are_done_are_refused_before_anything_is_written(out, saved):
    """A stray folder with a later number is no step that was taken."""
    stray = out / "checkpoints" / "99"
    stray.mkdir()
    (stray / "notes.txt").write_text("not a checkpoint")
    before = (out / "config.json").read_text()
    with pytest.raises(UserError, match=r"has taken 2 steps, and total_steps=1\. Raise it, choose"):
        claim(small(out=str(out), total_steps=1))
    assert (out / "config.json").read_text() == before
    assert claim(small(out=str(out), total_steps=2)) == ["total_steps was 10, now 2"]


def test_what_cannot_be_moved_stays(saved, out, monkeypatch):
    """The folder that a run begins from, and the current one."""
    with pytest.raises(UserError, match=r"init_from=.* is in the folder .* choose another"):
        claim(small(out=str(out), init_from=str(out), resume=False))
    monkeypatch.chdir(out)
    with pytest.raises(OSError, match=r"Device or resource busy"):
        claim(small(out=".", resume=False))
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def test_a_run_that_does_not_resume_moves_the_old_one_out_of_the_way(tmp_path, out):
    """To a name that nothing has, not even a dangling link."""
    out.with_name("run.2").symlink_to("gone")
    old, new = (small(out=str(out), resume=False, seed=seed) for seed in (0, 1))
    for config in (old, new, new):
        assert RunFolder(config, print).begins()
        assert claim(config) == []
        (out / "metrics.jsonl").write_text(str(config.seed))
    names = ("run", "run.1", "run.3")
    assert [(tmp_path / name / "metrics.jsonl").read_text() for name in names] == ["1", "0", "1"]


def test_whatever_is_left_of_a_run_is_moved(tmp_path, out):
    for number, left in enumerate(("config.json", "metrics.jsonl", "checkpoints"), 1):
        (out / left).mkdir(parents=True)
        assert claim(small(out=str(out), resume=False)) == []
        assert (tmp_path / f"run.{number}" / left).is_dir()
        (out / "config.json").unlink()


def test_a_run_that_continues_is_left_alone_and_its_lock_moves_with_it(tmp_path, out):
    config, anew = small(out=str(out)), small(out=str(out), resume=False)
    claim(config)
    before = (out / "config.json").stat()
    running = RunFolder(config, print)
    running.claim()
    for other in (config, anew):
        with pytest.raises(UserError, match="is in use by process"):
            claim(other)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert (out / "config.json").stat() == before
    running.release()
    running = RunFolder(anew, print)
    running.claim()
    with pytest.raises(UserError, match="is in use"):
        claim(config)
    claim(small(out=f"{out}.1"))
    running.release()
    claim(config)


def test_a_file_in_the_place_of_a_folder_is_named_and_the_other_way_round(out):
    out.touch()
    with pytest.raises(FileExistsError, match=str(out)):
        claim(small(out=str(out)))
    for name in ("config.json", "config.json.unfinished"):
        other = out.with_name(name)
        (other / name).mkdir(parents=True)
        with pytest.raises(NotWritten, match=r"config\.json could not be written in .*directory"):
            claim(small(out=str(other)))


def test_the_end_of_text_is_written_once(out):
    path = out / "generation_config.json"
    for end, written in ((None, None), (3, 3), (4, 3)):
        claim(small(out=str(out)), end_of_text=end)
        assert (json.loads(path.read_text())["eos_token_id"] if path.exists() else None) == written
