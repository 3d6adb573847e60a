"""A save that fails leaves nothing behind, although orbax goes on writing for a moment."""

import errno
import logging
import sys
import threading
import time

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

from coat_jax.training.checkpoint import checkpoints
from coat_jax.training.checkpoint.checkpoints import Checkpoints, wait_until_quiet
from coat_jax.writing import DiskFull


@pytest.fixture
def straggler(tmp_path, monkeypatch):
    """Makes a save fail while a thread writes more of it: twelve files, one every 20 ms."""
    written = tmp_path / "1.unfinished" / "state.orbax-checkpoint-tmp" / "d"

    def write():
        for i in range(12):
            time.sleep(0.02)
            written.mkdir(parents=True, exist_ok=True)
            (written / str(i)).write_text("late")

    thread = threading.Thread(target=write)
    wait = ocp.StandardCheckpointer.wait_until_finished

    def fail(self):
        wait(self)
        if written.parent.with_name("state").exists():  # a save has ended
            thread.start()
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ocp.StandardCheckpointer, "wait_until_finished", fail)
    return thread


def test_what_is_written_after_a_failure_is_removed_too(tmp_path, straggler, monkeypatch):
    # On a busy machine the thread may be slower than the default allows.
    monkeypatch.setattr(checkpoints, "QUIET", 1.0)
    saving = Checkpoints(tmp_path)
    saving.save(1, {"w": jnp.ones(3)}, {})
    with pytest.raises(DiskFull, match="step 1 does not fit"):
        saving.wait()
    straggler.join()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_keeps_changing_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "QUIET", 0.01)
    for name in ("", "absent"):
        wait_until_quiet(tmp_path / name)

    def grow(seconds):
        (tmp_path / str(time.monotonic_ns())).touch()

    monkeypatch.setattr(time, "sleep", grow)
    monkeypatch.setattr(checkpoints, "PATIENCE", 0.2)
    begin = time.monotonic()
    wait_until_quiet(tmp_path)
    assert 0.2 <= time.monotonic() - begin < 30


def record(path, raise_in=None, level=logging.ERROR):
    """A log record of a file, with an error that a function of another file raised."""
    error = None
    if raise_in:
        try:
            exec(compile("raise ValueError", raise_in, "exec"))
        except ValueError:
            error = sys.exc_info()
    return logging.LogRecord("absl", level, path, 1, "said", None, error)


def test_only_errors_of_orbax_are_not_logged(tmp_path):
    with Checkpoints(tmp_path) as saving:
        saving.save(1, {"w": jnp.ones(3)}, {})
    of_orbax, asyncio = "/lib/orbax/checkpoint/async_checkpointer.py", "/lib/asyncio/base_events.py"
    for made, logged in (
        (record(of_orbax), False),
        (record(of_orbax, level=logging.WARNING), True),
        (record(asyncio, "/lib/orbax/serialization.py"), False),
        (record(asyncio, "/home/own/server.py"), True),
        (record("/lib/grain/loader.py"), True),
    ):
        for name in ("absl", "asyncio"):
            assert bool(logging.getLogger(name).filter(made)) is logged
