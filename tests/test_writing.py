"""Laws of folders that appear when they are complete, and of errors about what does not fit."""

import errno
import os
from pathlib import Path

import pytest

from coat_jax.errors import UserError
from coat_jax.writing import DiskFull, atomic_folder, replace, write_failures

COMMAND = "coat test"


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def test_all_is_on_the_disk_before_a_folder_has_its_name(out, monkeypatch):
    """Otherwise a power failure could leave a folder that is whole but for its content."""
    flushed = set()
    fsync = os.fsync

    def record(descriptor):
        assert not out.exists()
        flushed.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    with atomic_folder(out, COMMAND) as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "weights").write_bytes(b"1")
        (folder / "config.json").write_bytes(b"{}")
    written = [out, *out.rglob("*")]
    assert len(written) == 4
    assert flushed == {path.stat().st_ino for path in written}


def test_a_folder_that_is_not_finished_never_has_its_name(out):
    def interrupted():
        with atomic_folder(out, COMMAND) as folder:
            (folder / "config.json").write_bytes(b"{}")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not list(out.parent.iterdir())


@pytest.mark.parametrize("path", ["nowhere/..", ".", "/"])
def test_a_path_without_a_name_is_no_new_folder(path, tmp_path):
    folder = atomic_folder(tmp_path / path if path == "nowhere/.." else Path(path), COMMAND)
    with pytest.raises(UserError, match="does not end in the name of a new file or folder"), folder:
        pass


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (errno.ENOSPC, "No space left on device"),
        (errno.EDQUOT, "Disk quota exceeded"),
        (errno.EFBIG, "File too large"),
    ],
)
def test_what_does_not_fit_is_named_with_its_limit(code, said, tmp_path):
    needed = r"it takes up to 1\.0 MB, and [\d,.]+ MB are free\. Make room there"
    refusal = rf"^Step 3 does not fit in {tmp_path} \({said}\): {needed}.* before is intact\.$"
    with pytest.raises(DiskFull, match=refusal), write_failures(tmp_path, "Step 3", size=10):
        raise OSError(code, os.strerror(code))


def test_a_file_that_cannot_be_replaced_stays_as_it_is(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = tmp_path / "file"
    replace(file, "old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace(file, "new")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"file": "old"}


def test_of_two_that_write_a_folder_at_once_one_is_refused(out):
    with atomic_folder(out, COMMAND) as folder:
        again = atomic_folder(out, COMMAND)
        with pytest.raises(UserError, match=f"another `{COMMAND}` is writing it"), again:
            pass
        (folder / "file").write_text("mine")
    assert (out / "file").read_text() == "mine"


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_has_the_temporary_name_of_a_file_is_replaced(kind, tmp_path):
    elsewhere, unfinished = tmp_path / "elsewhere", tmp_path / "plot.html.unfinished"
    elsewhere.write_text("mine")
    if kind == "link":
        unfinished.symlink_to(elsewhere)
    else:
        os.mkfifo(unfinished)
    replace(tmp_path / "plot.html", "new")
    assert elsewhere.read_text() == "mine"
    assert (tmp_path / "plot.html").read_text() == "new"
    assert not (tmp_path / "plot.html").is_symlink()
