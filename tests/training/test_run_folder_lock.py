"""A folder is one process's at a time, and nobody's when that has ended, however it ended.

This file is also the program of another process, which holds the lock of a folder.
"""

import errno
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from forks import Fork

from coat_jax.errors import UserError
from coat_jax.training import run_folder
from coat_jax.training.run_folder import LOCK, lock


def silent(text):
    raise AssertionError(f"noted: {text}")


def test_who_holds_it_is_named_and_the_lock_ends_with_its_process(tmp_path):
    holder = Fork([__file__, tmp_path])
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=rf"in use by process {holder.pid} on .* began at 20"):
            lock(tmp_path, silent)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    lock(tmp_path, silent).close()


def test_a_lock_is_of_the_folder_wherever_that_is_moved(tmp_path):
    """Also within one process: the kernel tells open files apart, not processes."""
    old, new = tmp_path / "run", tmp_path / "run.1"
    old.mkdir()
    with lock(old, silent):
        with pytest.raises(UserError, match=f"process {os.getpid()} on"):
            lock(old, silent)
        old.rename(new)
        old.mkdir()
        with lock(old, silent), pytest.raises(UserError, match=r"run\.1 is in use"):
            lock(new, silent)
    lock(new, silent).close()


def test_control_characters_of_the_file_do_not_reach_the_terminal(tmp_path):
    with lock(tmp_path, silent):
        (tmp_path / LOCK).write_bytes(b"\x1b[2J\nevil \xff\n" + b"x" * 10_000)
        with pytest.raises(UserError) as refused:
            lock(tmp_path, silent)
    assert r"\x1b[2J evil" in str(refused.value)
    assert len(str(refused.value)) < 500


def test_a_link_is_not_written_through(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("data")
    (tmp_path / LOCK).symlink_to(precious)
    with pytest.raises(OSError, match="symbolic links"):
        lock(tmp_path, silent)
    assert precious.read_text() == "data"


def test_a_file_system_without_locks_is_noted(tmp_path, monkeypatch):
    def refuse(file, flags):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(run_folder.fcntl, "flock", refuse)
    notes = []
    lock(tmp_path, notes.append).close()
    (note,) = notes
    assert "has no locks" in note


if __name__ == "__main__":
    with lock(Path(sys.argv[1]), print):
        print("held", flush=True)
        time.sleep(600)
