"""What lies among checkpoints, or happens to one, costs at most that one.

The states are files here: what a checkpoint of arrays is, test_checkpoint.py tries out.
"""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from coat_jax import manifest, writing
from coat_jax.errors import UserError
from coat_jax.manifest import DamagedCheckpoint
from coat_jax.training.checkpoint.step_folders import StepFolders


def save(folders, step):
    """As `Checkpoints` does."""
    assert folders.clear() == []
    folders.begin(step)
    folder = folders.unfinished(step)
    (folder / "state" / "d").mkdir(parents=True)
    (folder / "state" / "d" / "arrays").write_text(f"numbers of step {step}")
    record = {"step": step, "loss": None, "extra": {}}
    writing.write_durably(folder / "record.json", json.dumps(record))
    folders.finish(step)


@pytest.fixture
def root(tmp_path):
    return tmp_path / "checkpoints"


@pytest.fixture
def three(root):
    """The steps 10, 20 and 30."""
    folders = StepFolders(root)
    for step in (10, 20, 30):
        save(folders, step)
    return folders


def make_file(path):
    path.write_text("")


def make_dangling_link(path):
    path.symlink_to("nowhere")


def make_link_to_itself(path):
    path.symlink_to(path)


def make_link_to_a_file(path):
    path.symlink_to(os.devnull)


STRAY = ["99", "007", "٣", "²", "1e3", "-1", "9" * 200, "40", "latest"]
LEFT_OVER = ["5.unfinished", "30.unfinished", "40.unfinished", "10.deleted", "99.deleted"]


@pytest.mark.parametrize("name", [*STRAY, *LEFT_OVER, "notes.unfinished"])
@pytest.mark.parametrize(
    "make",
    [make_file, Path.mkdir, make_dangling_link, make_link_to_itself, make_link_to_a_file],
)
def test_other_files_are_no_steps_and_do_no_harm(root, three, name, make):
    make(root / name)
    assert three.steps() == [10, 20, 30]
    assert three.newest_whole()[0] == 30
    save(three, 40)
    assert three.steps() == [10, 20, 30, 40]
    for step in (10, 40):
        three.remove(step)
    assert three.newest_whole()[0] == 30


@pytest.mark.parametrize("name", ["007", "030", "٣٠", "+30", " 30", "30.0"])
def test_a_name_is_a_step_only_as_python_writes_it(root, three, name):
    shutil.copytree(root / "30", root / name)
    assert three.steps() == [10, 20, 30]
    step, notes = three.newest_whole()
    assert (step, notes) == (30, [])


def test_folders_with_other_names_stay(root, three):
    for name in ("notes.unfinished", "007", "latest"):
        (root / name).mkdir()
    save(three, 40)
    assert {"notes.unfinished", "007", "latest"} <= {path.name for path in root.iterdir()}


def test_a_folder_that_is_no_checkpoint_is_passed_over_and_replaced(root, three):
    (root / "99").mkdir()
    (root / "99" / "notes.txt").write_text("")
    step, notes = three.newest_whole()
    assert step == 30
    assert "99 is damaged: manifest.json is missing. Using step 30 instead." in notes[0]
    save(three, 40)
    assert three.steps() == [10, 20, 30, 40]


def test_a_copy_under_another_number_is_not_that_step(root, three):
    shutil.copytree(root / "30", root / "99")
    step, notes = three.newest_whole()
    assert step == 30
    assert "99 is damaged: record.json is that of another step" in notes[0]


def test_a_link_to_a_checkpoint_is_one_and_removing_it_leaves_the_checkpoint(tmp_path, root, three):
    """Its owner moved it to another disk."""
    moved = tmp_path / "elsewhere"
    (root / "20").rename(moved)
    (root / "20").symlink_to(moved)
    assert three.check(20) == root / "20"
    three.remove(20)
    assert three.steps() == [10, 30]
    manifest.check(moved)
    assert sorted(path.name for path in root.iterdir()) == ["10", "30"]


def test_a_link_among_left_overs_is_removed_alone(tmp_path, root, three):
    target = tmp_path / "data"
    target.mkdir()
    (target / "file").write_text("")
    for name in ("40.unfinished", "10.deleted"):
        (root / name).symlink_to(target)
    save(three, 40)
    assert (target / "file").exists()
    assert sorted(path.name for path in root.iterdir()) == ["10", "20", "30", "40"]


FILES = ["manifest.json", "record.json", "state/d/arrays"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=range(3)
)
def test_anything_but_a_file_in_its_place_is_damage(root, three, name, make):
    """None of these is read: a device has no end."""
    (root / "30" / name).unlink()
    make(root / "30" / name)
    step, notes = three.newest_whole()
    assert step == 20
    assert "30 is damaged" in notes[0]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("error", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_a_file_that_cannot_be_read_is_damage(root, three, name, error, monkeypatch):
    bad = root / "30" / name
    reading = Path.open

    def fail(path, *arguments, **options):
        if path == bad:
            raise OSError(error, os.strerror(error), str(path))
        return reading(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", fail)
    step, notes = three.newest_whole()
    assert step == 20
    assert f"{bad.name} cannot be read ({os.strerror(error)})" in notes[0]
    with pytest.raises(DamagedCheckpoint, match="cannot be read"):
        three.check(30)


MANIFESTS = ["{}", "[]", "null", "\0", "[" * 100_000, '{"/dev/zero": [0, 0]}', '{"../20": [0, 0]}']
NUMBERS = ["[1]", "[1e999, 0]", '["a", "b"]', "null", "[-1, -1]"]


@pytest.mark.parametrize("text", [*MANIFESTS, *(f'{{"record.json": {n}}}' for n in NUMBERS)])
def test_any_manifest_is_read_or_refused(root, three, text):
    (root / "30" / "manifest.json").write_text(text)
    step, notes = three.newest_whole()
    assert step == 20
    assert "30 is damaged" in notes[0]


@pytest.mark.parametrize(
    "text", ["{}", "[]", "null", "1", '{"step": 30}', '{"step": "30", "extra": {}}', "[" * 100_000]
)
def test_any_record_is_read_or_refused(root, three, text):
    """Also one whose checksum is right."""
    (root / "30" / "record.json").write_text(text)
    (root / "30" / "manifest.json").unlink()
    manifest.write(root / "30")
    step, notes = three.newest_whole()
    assert step == 20
    assert "record.json" in notes[0]
    assert three.newest_record() == {"step": 20, "loss": None, "extra": {}}


def test_names_in_a_manifest_cannot_reach_the_terminal(root, three):
    (root / "30" / "manifest.json").write_text(json.dumps({"\x1b[2J\x9b": [1, 2]}))
    with pytest.raises(DamagedCheckpoint) as found:
        three.check(30)
    assert r"\x1b[2J\x9b is missing" in str(found.value)


def test_a_folder_that_cannot_be_removed_is_named_and_does_no_harm(root, three, monkeypatch):
    (root / "5.unfinished").mkdir()

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        assert three.clear() == [root / "5.unfinished"]
        three.remove(10)  # it no longer counts, whatever is left of it
        assert three.steps() == [20, 30]
    assert three.clear() == []
    assert sorted(path.name for path in root.iterdir()) == ["20", "30"]


def test_a_file_instead_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file, where checkpoints need a folder"):
        StepFolders(tmp_path / "file")


@pytest.mark.parametrize("target", ["nowhere", "checkpoints"])
def test_a_link_to_what_is_not_there_is_refused(root, target):
    """The disk with the checkpoints is missing: to begin anew would remove the records."""
    root.symlink_to(target)
    with pytest.raises(UserError, match="links to what is not there"):
        StepFolders(root)
