"""JAX's compilation cache: a restarted run does not compile its step again.

    use_cache(folder)    before anything is compiled

JAX only warns if it cannot write to the folder, after it has compiled the first program, so the
folder is checked here. It also warns of an entry that it cannot read, as one is that a full disk
has cut off, and never replaces it: delete that entry.
"""

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import jax

from coat_jax.errors import UserError
from coat_jax.files import expand_user

FOLDER = "~/.cache/coat_jax/xla"  # unless a config names another


def use_cache(folder: str | None, note: Callable[[str], object] = warnings.warn) -> None:
    """Makes JAX store compiled programs in a folder, unless JAX is configured to use another one.

    Args:
        folder: None stores nothing. URLs such as gs://bucket/cache are passed to JAX as they are.
        note: called with a line if another folder is used, because JAX is configured to use it, or
            if that one or the default folder cannot be written.

    Raises:
        UserError: if any other folder cannot be written.
    """
    if folder is None:
        return
    path = folder if is_url(folder) else str(expand_user(folder))
    configured = jax.config.values["jax_compilation_cache_dir"]
    used = configured or path
    if folder != FOLDER and used != path:
        note(
            f"The compilation cache is {used}, not {path}: jax_compilation_cache_dir or "
            "JAX_COMPILATION_CACHE_DIR has been set."
        )
    if problem := why_unusable(used):
        if folder != FOLDER and not configured:
            raise UserError(f"{problem} Choose another --cache, or none: --cache none.")
        note(f"{problem} Every start compiles anew.")
        return
    jax.config.update("jax_compilation_cache_dir", used)
    # See coat_jax.kernels.sharding.
    jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)


def is_url(folder: str) -> bool:
    """Returns whether a folder is not in this machine's file system, as gs://bucket/cache."""
    return "://" in folder


def why_unusable(folder: str) -> str | None:
    """Returns why a folder, which need not exist yet, cannot be written to, or None."""
    if is_url(folder):
        return None
    path = Path(folder)
    there = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return None
    lacks = "writable" if there.is_dir() else "a folder"
    return f"The compilation cache {folder} cannot be used: {there} is not {lacks}."
