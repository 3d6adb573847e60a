"""Saves with orbax so that a save that fails leaves no files behind, and says why once.

Orbax raises the error of the first array that it could not write, while others are still being
written. Their files would appear in a folder that the caller has removed, and their errors are
logged with tracebacks, by orbax and by asyncio. (TensorStore may print that an event loop is
closed: it reports to one that orbax no longer runs.)
"""

import contextlib
import errno
import logging
import os
import time
import traceback
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from coat_jax.optax.states.checkpoint import LiteralPath

QUIET, PATIENCE = 0.2, 10.0  # seconds


class Checkpointer(ocp.StandardCheckpointer):
    """A StandardCheckpointer that writes nothing more once it has raised an error."""

    def save(self, directory: Path, *args: Any, **settings: Any) -> None:
        """Copies a state to the host, then writes it in the background."""
        self._written = directory.parent  # orbax writes in a temporary folder beside it
        super().save(LiteralPath(directory), *args, **settings)

    def wait_until_finished(self) -> None:
        """Waits for the last save; raises what went wrong in it."""
        try:
            super().wait_until_finished()
        except Exception as error:
            wait_until_quiet(self._written)
            if isinstance(error, ValueError) and "os_error_code" not in str(error):
                reason = "Files of it were removed meanwhile"  # orbax does not find them any more
                raise FileNotFoundError(errno.ENOENT, reason, str(self._written)) from error
            raise


def wait_until_quiet(folder: Path, quiet: float = QUIET, patience: float = PATIENCE) -> None:
    """Returns when no file in a folder has appeared, grown or vanished for `quiet` seconds.

    A folder that keeps changing is not waited for longer than `patience` seconds.
    """
    deadline = time.monotonic() + patience
    before, now = None, _sizes(folder)
    while now != before and time.monotonic() < deadline:
        time.sleep(quiet)
        before, now = now, _sizes(folder)


def _sizes(folder: Path) -> dict[str, int]:
    """The size of each file in a folder, by path; files may vanish meanwhile."""
    sizes = {}
    for path, _, files in os.walk(folder):
        sizes[path] = 0
        for name in files:
            with contextlib.suppress(FileNotFoundError):
                sizes[f"{path}/{name}"] = os.lstat(f"{path}/{name}").st_size
    return sizes


def log_no_errors_of_orbax() -> None:
    """Keeps orbax, and asyncio for its tasks, from logging what orbax also raises."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_no_error_of_orbax)


def _is_no_error_of_orbax(record: logging.LogRecord) -> bool:
    if record.levelno < logging.ERROR:
        return True
    error = record.exc_info[2] if record.exc_info else None
    files = [record.pathname, *(frame.filename for frame in traceback.extract_tb(error))]
    return not any("orbax" in Path(file).parts for file in files)
