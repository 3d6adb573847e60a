"""Saves with orbax: so that a failed save leaves no files, and arrays larger than memory.

Orbax raises the error of the first array that it could not write, while others are still being
written. Their files would appear in a folder that the caller has removed, and their errors are
logged with tracebacks, by orbax and by asyncio. (TensorStore may print that an event loop is
closed: it reports to one that orbax no longer runs.)
"""

import asyncio
import logging
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import tensorstore

from coat_jax.models import lazy_arrays
from coat_jax.models.lazy_arrays import LazyArray
from coat_jax.optax.states.checkpoint import LiteralPath, stored_metadata

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


# --- Arrays larger than memory ---------------------------------------------------------------
#
# Orbax makes the folder, chooses the place of each array and writes the metadata; the handler here
# writes the arrays one at a time, piece by piece. The result is an ordinary checkpoint.


class _Leaf:
    """An array to be written, with the attributes that orbax needs."""

    def __init__(self, source: LazyArray):
        self.source, self.shape, self.dtype = source, source.shape, source.dtype
        self.size = self.nbytes = 1  # of what is in memory


class _Handler(ocp.type_handlers.NumpyHandler):
    def __init__(self, progress: Callable[[int], object]) -> None:
        super().__init__(deepcopy_host_arrays=False)
        self._progress, self._turn, self._has_failed = progress, asyncio.Lock(), False

    async def _open_and_write(self, value: _Leaf, tspec: Any, ts_context: Any) -> None:
        # One array at a time, and none after one that failed: then nothing is pending when orbax
        # closes the event loop.
        async with self._turn:
            if self._has_failed:
                return
            self._has_failed = True
            spec = tensorstore.Spec(tspec)
            array = await tensorstore.open(spec, create=True, open=True, context=ts_context)
            piece: Any = array.chunk_layout.write_chunk.shape
            for index in lazy_arrays.pieces(value.source._replace(piece=piece)):
                part = value.source.read(index)
                await array[index].write(part)
                self._progress(part.nbytes)
            self._has_failed = False


def save_lazy_arrays(path: Path, tree: Any, progress: Callable[[int], object]) -> None:
    """Saves nested dicts of `LazyArray`s to a new folder.

    `progress` is called with the number of bytes read since its last call.
    """
    _log_no_errors_of_orbax()

    def chunked(source: LazyArray) -> Any:
        layers = (0,) if source.piece[:1] == (1,) else ()
        return ocp.SaveArgs(chunk_byte_size=lazy_arrays.PIECE, shard_axes=layers)

    leaves = {"is_leaf": lambda node: isinstance(node, LazyArray)}
    arguments = ocp.args.PyTreeSave(
        jax.tree.map(_Leaf, tree, **leaves), save_args=jax.tree.map(chunked, tree, **leaves)
    )
    registry = ocp.type_handlers.create_type_handler_registry(
        (_Leaf, _Handler(progress)),
        (jax.Array, ocp.type_handlers.ArrayHandler()),  # orbax warns where it is missing
    )
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(LiteralPath(path), args=arguments)
    stored_metadata(path)
