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

    URLs such as gs://bucket/cache are passed to JAX as they are. A folder that cannot be written is
    refused, but `note` is called with a line if it is the default one.
    """
    if folder is None:
        return
    # See coat_jax.kernels.sharding.
    jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)
    if jax.config.values["jax_compilation_cache_dir"]:  # or JAX_COMPILATION_CACHE_DIR
        return
    path = folder if "://" in folder else str(expand_user(folder))
    if (problem := why_unusable(path)) is None:
        jax.config.update("jax_compilation_cache_dir", path)
    elif folder == FOLDER:
        note(f"{problem} Every start compiles anew.")
    else:
        raise UserError(f"{problem} Choose another --cache, or none: --cache none.")


def why_unusable(folder: str) -> str | None:
    """Returns why a folder, which need not exist yet, cannot be written to, or None."""
    if "://" in folder:
        return None
    path = Path(folder)
    there = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return None
    lacks = "writable" if there.is_dir() else "a folder"
    return f"The compilation cache {folder} cannot be used: {there} is not {lacks}."
