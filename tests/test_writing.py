"""Laws of folders that appear when they are complete, and of errors about what does not fit."""

import errno
import os
import resource
import signal
from pathlib import Path

import pytest

from coat_jax.errors import UserError
from coat_jax.writing import DiskFull, NewFolder, full_disk, replace, write_failures


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_the_process_leaves_no_folder(number, new):
    def terminated():
        with new.appearing() as folder:
            (folder / "config.json").write_bytes(b"{}")
            assert signal.getsignal(number) is not signal.SIG_DFL  # which would end the tests
            signal.raise_signal(number)

    with pytest.raises(SystemExit) as ended:
        terminated()
    assert ended.value.code == 128 + number
    assert not list(new.out.parent.iterdir())
    assert signal.getsignal(number) is signal.SIG_DFL


def test_a_signal_that_is_ignored_stays_ignored(new):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        with new.appearing():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert new.out.is_dir()


@pytest.mark.parametrize("path", ["nowhere/..", ".", "/"])
def test_a_path_without_a_name_is_no_new_folder(path, tmp_path):
    with pytest.raises(UserError, match="does not end in the name of a new folder"):
        NewFolder(tmp_path / path if path == "nowhere/.." else Path(path), "a test").require_new()


@pytest.mark.parametrize(
    ("code", "limit", "said"),
    [
        (errno.ENOSPC, 4096, r"it takes up to 1\.0 MB, and [\d,.]+ MB are free\. Make room there"),
        (errno.EDQUOT, 4096, r"it takes up to 1\.0 MB, and the quota is used up\. Make room there"),
        (
            errno.EFBIG,
            4096,
            r"a file may have at most 4,096 bytes\. Raise this limit \(`ulimit -f`\)",
        ),
        (
            errno.EFBIG,
            resource.RLIM_INFINITY,
            r"its file system has no files that large\. Choose a",
        ),
    ],
)
def test_what_does_not_fit_is_named_with_its_limit(code, limit, said, tmp_path, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    refusal = rf"^Step 3 does not fit in {tmp_path}: {said}.*; what was saved before is intact\.$"
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


def test_what_a_block_cannot_read_does_not_fill_the_disk(tmp_path):
    with pytest.raises(OSError, match="Input/output error") as raised, full_disk(tmp_path, "It"):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    assert not isinstance(raised.value, UserError)


def test_of_two_that_write_a_folder_at_once_one_is_refused(tmp_path):
    one, other = (NewFolder(tmp_path / "out", "coat test") for _ in range(2))
    one.require_new()
    other.require_new()
    with one.appearing() as folder:
        with pytest.raises(UserError, match="another `coat test` is writing it"), other.appearing():
            pass
        (folder / "file").write_text("mine")
    assert (tmp_path / "out" / "file").read_text() == "mine"


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
