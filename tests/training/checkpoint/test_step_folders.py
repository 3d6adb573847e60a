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
    folders.clear()
    folder = folders.temporary(step)
    (folder / "state" / "d").mkdir(parents=True)
    (folder / "state" / "d" / "arrays").write_text(f"numbers of step {step}")
    record = {"step": step, "loss": None, "extra": {}}
    writing.replace(folder / "record.json", json.dumps(record))
    folders.finish(step)


def newest(folders):
    """The newest intact step, and the notes about others."""
    notes = []
    return folders.intact(None, notes.append), notes


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


def link_to_itself(path):
    path.symlink_to(path)


def link_to_a_file(path):
    path.symlink_to(os.devnull)


STRAY = ["99", "007", "٣", "²", "1e3", "-1", "9" * 200, "40", "latest"]
LEFT_OVER = ["5.unfinished", "30.unfinished", "40.unfinished", "10.deleted", "99.deleted"]


@pytest.mark.parametrize("make", [Path.touch, link_to_itself, link_to_a_file])
def test_other_files_are_no_steps_and_do_no_harm(root, three, make):
    """Those whose names are no steps stay."""
    for name in [*STRAY, *LEFT_OVER, "notes.unfinished"]:
        make(root / name)
    assert three.steps() == [10, 20, 30]
    assert newest(three)[0] == 30
    save(three, 40)
    assert three.steps() == [10, 20, 30, 40]
    for step in (10, 40):
        three.remove(step)
    assert newest(three)[0] == 30
    left = {path.name for path in root.iterdir()}
    assert left == {*STRAY, "20", "30", "notes.unfinished"} - {"40"}


def test_a_folder_that_is_not_that_checkpoint_is_passed_over_and_replaced(root, three):
    (root / "99").mkdir()
    (root / "99" / "notes.txt").write_text("")
    for name in ("98", "007", "٣٠", "+30", " 30", "30.0"):  # a step is as Python writes it
        shutil.copytree(root / "30", root / name)
    assert three.steps() == [10, 20, 30, 98, 99]
    step, notes = newest(three)
    assert step == 30
    assert "99 is damaged: manifest.json is missing. Using step 30 instead." in notes[0]
    assert "98 is damaged: record.json is that of another step" in notes[1]
    save(three, 40)
    assert three.steps() == [10, 20, 30, 40]


def test_links_are_followed_and_removed_alone(tmp_path, root, three):
    """The owner of a checkpoint moved it to another disk. Left-overs may be links, too."""
    moved, target = tmp_path / "elsewhere", tmp_path / "data"
    (root / "20").rename(moved)
    (root / "20").symlink_to(moved)
    target.mkdir()
    (target / "file").write_text("")
    for name in ("40.unfinished", "10.deleted"):
        (root / name).symlink_to(target)
    three.check(20)
    three.remove(20)
    manifest.check(moved)
    save(three, 40)
    assert (target / "file").exists()
    assert sorted(path.name for path in root.iterdir()) == ["10", "30", "40"]


def flip(path):
    content = bytearray(path.read_bytes())
    content[2] ^= 1
    path.write_bytes(content)


def replaced(make):
    """Puts something else in place of a file."""

    def harm(path):
        path.unlink()
        make(path)

    return harm


HARMS = [
    (Path.unlink, "is missing"),
    (replaced(os.mkfifo), "is missing"),
    (replaced(Path.mkdir), "is missing"),
    (replaced(lambda path: path.symlink_to("/dev/zero")), "is missing"),  # a device has no end
    (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes instead of|is not readable"),
    (lambda path: path.write_bytes(b""), "has 0 bytes instead of|is not readable"),
    (flip, "checksum of .* is wrong|is not readable|bytes instead of"),
]


@pytest.mark.parametrize("name", ["manifest.json", "record.json", "state/d/arrays"])
@pytest.mark.parametrize(("harm", "words"), HARMS)
def test_damage_of_any_file_is_found_and_named(root, three, name, harm, words, monkeypatch):
    """In any of the chunks in which it is read."""
    monkeypatch.setattr(manifest, "CHUNK", 8)
    harm(root / "30" / name)
    with pytest.raises(DamagedCheckpoint, match=f"{root}/30 is damaged: .*({words})"):
        three.check(30)
    step, notes = newest(three)
    assert step == 20
    assert f"{root}/30 is damaged" in notes[0]
    assert notes[0].endswith("Using step 20 instead.")


@pytest.mark.parametrize("name", ["manifest.json", "record.json", "state/d/arrays"])
def test_a_file_that_cannot_be_read_is_damage(root, three, name, monkeypatch):
    bad = root / "30" / name
    reading = Path.open

    def fail(path, *arguments, **options):
        if path == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return reading(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(DamagedCheckpoint, match=rf"{bad.name} cannot be read \(Input/output error"):
        three.check(30)
    assert newest(three)[0] == 20


MANIFESTS = ["{}", "[]", "null", "\0", "[" * 100_000, '{"/dev/zero": [0, 0]}', '{"../20": [0, 0]}']
NUMBERS = ["[1]", "[1e999, 0]", '["a", "b"]', "null", "[-1, -1]"]


def test_any_manifest_is_read_or_refused(root, three):
    (root / "30" / "manifest.json").write_text(json.dumps({"\x1b[2J\x9b": [1, 2]}))
    with pytest.raises(DamagedCheckpoint) as found:
        three.check(30)
    assert r"\x1b[2J\x9b is missing" in str(found.value)
    for text in [*MANIFESTS, *(f'{{"record.json": {numbers}}}' for numbers in NUMBERS)]:
        (root / "30" / "manifest.json").write_text(text)
        step, notes = newest(three)
        assert step == 20
        assert "30 is damaged" in notes[0]
        assert three.newest_record() == {"step": 20, "loss": None, "extra": {}}


def test_a_folder_that_cannot_be_removed_no_longer_counts(root, three, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path, ignore_errors: None)
        three.remove(10)
        save(three, 40)
        assert three.steps() == [20, 30, 40]
        assert (root / "10.deleted").exists()
    three.clear()
    assert not (root / "10.deleted").exists()


def test_a_root_that_is_a_file_or_a_link_to_what_is_not_there_is_refused(tmp_path):
    """The disk with the checkpoints is missing: to begin anew would remove the records."""
    (tmp_path / "file").touch()
    for name, target in (("one", "nowhere"), ("itself", "itself")):
        (tmp_path / name).symlink_to(target)
    for name in ("file", "one", "itself"):
        with pytest.raises(UserError, match=f"{name} is a file, or links to what is not there"):
            StepFolders(tmp_path / name)
