"""Writes arrays that are larger than memory with orbax, piece by piece.

Orbax makes the folder, chooses the place of each array and writes the metadata; the handler here
writes the arrays one at a time, piece by piece. The result is an ordinary checkpoint.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from coat_jax.models import stored
from coat_jax.models.stored import Stored
from coat_jax.optax.states.checkpoint import LiteralPath, stored_metadata


class _Leaf:
    """An array to be written, with the attributes that orbax needs."""

    def __init__(self, source: Stored):
        self.source, self.shape, self.dtype = source, source.shape, source.dtype
        self.size = self.nbytes = 1  # of what is in memory


def save_streamed(path: Path, tree: Any, progress: Callable[[int], object]) -> None:
    """Saves a tree of `Stored` arrays to a new folder.

    Args:
        path: of the folder.
        tree: nested dicts.
        progress: called with the number of bytes read since its last call.
    """
    import orbax.checkpoint as ocp
    import tensorstore

    from coat_jax.training.checkpoint.orbax_failures import log_no_errors_of_orbax

    log_no_errors_of_orbax()

    class Handler(ocp.type_handlers.NumpyHandler):
        def __init__(self) -> None:
            super().__init__(deepcopy_host_arrays=False)
            self._turn = asyncio.Lock()
            self._has_failed = False

        async def _open_and_write(self, value: _Leaf, tspec: Any, ts_context: Any) -> None:
            # One array at a time, and none after one that failed: then nothing is pending when
            # orbax closes the event loop.
            async with self._turn:
                if self._has_failed:
                    return
                try:
                    await self._write(value.source, tensorstore.Spec(tspec), ts_context)
                except BaseException:
                    self._has_failed = True
                    raise

        async def _write(self, source: Stored, spec: Any, ts_context: Any) -> None:
            array = await tensorstore.open(spec, create=True, open=True, context=ts_context)
            piece: Any = array.chunk_layout.write_chunk.shape
            source = source._replace(piece=piece)
            for index in stored.pieces(source):
                part = source.read(index)
                await array[index].write(part)
                progress(part.nbytes)

    def chunked(source: Stored) -> Any:
        layers = (0,) if source.piece[:1] == (1,) else ()
        return ocp.SaveArgs(chunk_byte_size=stored.PIECE, shard_axes=layers)

    leaves = {"is_leaf": lambda node: isinstance(node, Stored)}
    arguments = ocp.args.PyTreeSave(
        jax.tree.map(_Leaf, tree, **leaves), save_args=jax.tree.map(chunked, tree, **leaves)
    )
    registry = ocp.type_handlers.create_type_handler_registry(
        (_Leaf, Handler()),
        (jax.Array, ocp.type_handlers.ArrayHandler()),  # orbax warns where it is missing
    )
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(LiteralPath(path), args=arguments)
    stored_metadata(path)
