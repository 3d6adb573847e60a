"""Laws of folders that appear when they are complete."""

import os
from pathlib import Path

import pytest

from coat_jax.errors import UserError
from coat_jax.writing import NewFolder


@pytest.fixture
def new(tmp_path):
    return NewFolder(tmp_path / "out", "a test")


def test_all_is_on_the_disk_before_a_folder_has_its_name(new, monkeypatch):
    """Otherwise a power failure could leave a folder that is whole but for its content."""
    flushed = set()
    fsync = os.fsync

    def record(descriptor):
        assert not new.out.exists()
        flushed.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    with new.appearing() as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "weights").write_bytes(b"1")
        (folder / "config.json").write_bytes(b"{}")
    written = [new.out, *new.out.rglob("*")]
    assert len(written) == 4
    assert flushed == {path.stat().st_ino for path in written}


def test_a_folder_that_is_not_finished_never_has_its_name(new):
    def interrupted():
        with new.appearing() as folder:
            (folder / "config.json").write_bytes(b"{}")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not list(new.out.parent.iterdir())


@pytest.mark.parametrize("path", ["nowhere/..", ".", "/"])
def test_a_path_without_a_name_is_no_new_folder(path, tmp_path):
    with pytest.raises(UserError, match="does not end in the name of a new folder"):
        NewFolder(tmp_path / path if path == "nowhere/.." else Path(path), "a test").require_new()
