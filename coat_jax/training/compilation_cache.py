"""JAX's compilation cache: a restarted run does not compile its step again.

    use_cache(folder)    before anything is compiled

JAX only warns if it cannot write to the folder, after it has compiled the first program, so the
folder is checked here. An entry that cannot be read is deleted: JAX writes entries in place, so one
that was only partly written when a process was killed would be read, refused and never replaced.
"""

import contextlib
import importlib.util
import os
import re
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from coat_jax.errors import UserError
from coat_jax.files import expanded

FOLDER = "~/.cache/coat_jax/xla"  # unless a config names another
CHECKED = "checked"
ZSTANDARD = b"\x28\xb5\x2f\xfd"  # how entries begin that are compressed with it
ENTRY = re.compile(r"-[0-9a-f]{64}-cache")  # how the names of JAX's entries end


def use_cache(folder: str | None, note: Callable[[str], object] = warnings.warn) -> None:
    """Makes JAX store compiled programs in a folder, unless JAX is configured to use another one.

    Args:
        folder: made if it is not there; None stores nothing. URLs such as gs://bucket/cache are
            passed to JAX as they are.
        note: called with a line if the folder is not used, because JAX is configured to use another
            one, or because the default folder cannot be written and nothing is stored.

    Raises:
        UserError: if any other folder cannot be written.
    """
    if folder is None:
        return
    path = folder if is_url(folder) else str(expanded(folder))
    used = jax.config.values["jax_compilation_cache_dir"]
    if not used:
        if not is_url(path) and (problem := _why_not_made(Path(path))):
            what = f"The compilation cache {path} cannot be used: {problem}."
            if folder != FOLDER:
                raise UserError(f"{what} Choose another --cache, or none: --cache none.")
            note(f"{what} Every start compiles anew. Choose another folder with --cache.")
            return
        jax.config.update("jax_compilation_cache_dir", path)
        used = path
    elif folder != FOLDER and used != path:
        note(
            f"The compilation cache is {used}, not {path}: jax_compilation_cache_dir or "
            "JAX_COMPILATION_CACHE_DIR has been set."
        )
    if not is_url(used) and (problem := why_unusable(Path(used))):
        note(f"The compilation cache {used} cannot be used: {problem}. Every start compiles anew.")
        return
    delete_unreadable(Path(used))
    # See coat_jax.kernels.cache_key.
    jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)


def is_url(folder: str) -> bool:
    """Whether a folder is not in this machine's file system, as gs://bucket/cache."""
    return "://" in folder


def why_unusable(folder: Path) -> str | None:
    """Why a folder, which need not exist yet, cannot be written to; None if it seems writable."""
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    called = "it" if there == folder else str(there)
    if not there.is_dir():
        return f"{called} is not a folder"
    return None if os.access(there, os.W_OK | os.X_OK) else f"{called} is not writable"


def _why_not_made(folder: Path) -> str | None:
    """Makes a folder if it is not there; returns why it cannot be used, or None."""
    problem = why_unusable(folder)
    if problem is None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            return str(error.strerror)
    return problem


def delete_unreadable(folder: Path) -> list[Path]:
    """Deletes the entries that end too early, and returns them.

    Entries that are older than the file `checked` were checked by an earlier start. What belongs to
    another user is left alone, and so is a folder in which nothing may be deleted, or that is not
    on this machine.
    """
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return []
    stamp = folder / CHECKED
    since = stamp.stat().st_mtime_ns if stamp.exists() else 0
    with contextlib.suppress(PermissionError):  # another user's, which keeps its time
        stamp.touch()
    deleted = []
    for path in entries(folder):
        # Another process of the run deletes it, too, or this user may not read or delete it.
        with contextlib.suppress(FileNotFoundError, PermissionError):
            if path.stat().st_mtime_ns >= since and not is_whole(path.read_bytes()):
                path.unlink()
                deleted.append(path)
    return deleted


def entries(folder: Path) -> list[Path]:
    """The programs in a folder, which may have other files, too."""
    return [path for path in folder.glob("*-cache") if ENTRY.search(path.name) and path.is_file()]


def is_whole(entry: bytes) -> bool:
    """Whether an entry can be decompressed to its end; it has no checksum in Zstandard.

    JAX compresses with that where it is installed; where it is not, such an entry is left alone.
    """
    decompressor: Any = zlib.decompressobj()
    if entry.startswith(ZSTANDARD):
        if importlib.util.find_spec("zstandard") is None:
            return True
        decompressor = importlib.import_module("zstandard").ZstdDecompressor().decompressobj()
    try:
        decompressor.decompress(entry)
    except Exception:  # zlib.error or ZstdError
        return False
    return bool(decompressor.eof)
