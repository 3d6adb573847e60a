"""Saves with orbax so that a failed save leaves no files.

Orbax raises the error of the first array that it could not write, while others are still being
written. Their files would appear in a folder that the caller has removed, and their errors are
logged with tracebacks, by orbax and by asyncio. (TensorStore may print that an event loop is
closed: it reports to one that orbax no longer runs.)
"""

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
        _log_no_errors_of_orbax()
        self._written = directory.parent  # orbax writes in a temporary folder beside it
        super().save(LiteralPath(directory), *args, **settings)

    def wait_until_finished(self) -> None:
        """Waits for the last save; raises what went wrong in it."""
        try:
            super().wait_until_finished()
        except Exception:
            wait_until_quiet(self._written)
            raise


def wait_until_quiet(folder: Path) -> None:
    """Returns when no file has appeared in a folder for QUIET seconds, or after PATIENCE."""
    deadline = time.monotonic() + PATIENCE
    before, now = None, list(os.walk(folder))
    while now != before and time.monotonic() < deadline:
        time.sleep(QUIET)
        before, now = now, list(os.walk(folder))


def _log_no_errors_of_orbax() -> None:
    """Keeps orbax, and asyncio for its tasks, from logging what orbax also raises."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_no_error_of_orbax)


def _is_no_error_of_orbax(record: logging.LogRecord) -> bool:
    if record.levelno < logging.ERROR:
        return True
    error = record.exc_info[2] if record.exc_info else None
    files = [record.pathname, *(frame.filename for frame in traceback.extract_tb(error))]
    return not any("orbax" in Path(file).parts for file in files)
