"""Saves and restores optimizer states, and refuses to restore one that does not fit.

Orbax silently casts what it restores to the dtype that it is asked for. FP8 codes that are read in
another format, or with another group size, would be wrong numbers. So `restore_state` first
compares the stored shapes and dtypes with the expected ones. The mesh may be another one: the
restored state has the shardings of the expected one.

A saved state has a manifest with checksums of its files, which `restore_state` compares first,
because orbax returns some damaged files as wrong numbers.

Besides arrays, a state may have typed random keys, which are stored as integers, and Python
numbers, which are stored as arrays without axes. Both are restored with their types.

Orbax is imported in the functions that need it, because that takes longer than importing coat_jax.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath  # type: ignore[import-untyped]
from jax.sharding import NamedSharding

from coat_jax import manifest
from coat_jax.errors import UserError
from coat_jax.files import expand_user
from coat_jax.multihost import run_on_main
from coat_jax.optax.states.host_memory import copy_hosted
from coat_jax.writing import write_failures

NUMBERS = bool | int | float | complex | np.generic  # stored as arrays without axes


class LiteralPath(epath.gpath.PosixGPath):
    """A path for orbax, which looks for its files with globs below it: see docs/upstream.md."""

    def glob(self, pattern: str) -> Iterator["LiteralPath"]:
        """The files that match the pattern; the path itself is taken as it is."""
        return map(type(self), Path(self).glob(pattern))


def save_state(path: str | Path, state: Any) -> None:
    """Writes a state and checksums of its files to a new directory; returns when it is complete.

    Several processes call this together.

    Args:
        path: the directory, which must not exist.
        state: a tree of arrays, random keys and numbers.
    """
    import orbax.checkpoint as ocp

    path = expand_user(path).absolute()
    if path.exists():
        raise FileExistsError(f"{path} exists already. Choose another path, or remove it first.")
    require_storable(state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(LiteralPath(path), storable(state))
    run_on_main(lambda: _add_manifest(path))


def _add_manifest(path: Path) -> None:
    """Writes the checksums of a state, which is removed if that fails."""
    try:
        with write_failures(path.parent, f"The state {path.name}"):
            stored_metadata(path)
            manifest.write(path)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise


def restore_state(path: str | Path, like: Any) -> Any:
    """Reads a state from `path`, with the structure and shardings of `like`.

    Every byte is compared with the checksums that `save_state`, or the trainer, wrote. A directory
    without any, as orbax itself writes one, is restored without this check. Several processes call
    this together; the first one compares.

    Args:
        path: a directory that `save_state` wrote.
        like: the state expected: arrays, or `jax.ShapeDtypeStruct`s, as `jax.eval_shape(tx.init,
            params)` gives them, with shardings where the state is to be sharded. (`eval_shape`
            forgets where `in_host_memory` keeps a state: give `init(params)` itself there.) Random
            keys are restored with the implementation that they have in `like`.

    Raises:
        FileNotFoundError: if there is no such directory.
        DamagedCheckpoint: if its files are not what was written.
        UserError: if the state in it has other leaves, shapes or dtypes than `like`.
    """
    folder = expand_user(path).absolute()
    run_on_main(lambda: _require_undamaged(folder))
    return read_state(folder, like)


def _require_undamaged(folder: Path) -> None:
    """Compares a state with its checksums, which in a run's checkpoint are one folder up."""
    if (folder / manifest.NAME).exists():
        manifest.check(folder)
    else:
        manifest.check_if_listed(folder.parent, folder.name)


def read_state(folder: Path, like: Any) -> Any:
    """`restore_state` of a folder whose checksums have been compared already."""
    import orbax.checkpoint as ocp

    arrays = require_stored_like(folder, like)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(LiteralPath(folder), arrays)
    return jax.tree.map(_from_array, like, restored)


def require_stored_like(path: Path, like: Any) -> Any:
    """Returns the tree to ask orbax for; raises unless `path` has the leaves and dtypes of `like`.

    A Python number in `like` may be stored in any dtype of its kind: jit makes an array of it.

    Raises:
        FileNotFoundError: if there is none.
        UserError: naming what differs.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"There is no checkpoint at {path}.")
    require_storable(like)
    stored = stored_metadata(path).tree
    arrays = _asked_for(like, stored)
    _require_same(path, stored, arrays)
    return arrays


def stored_metadata(path: Path) -> Any:
    """Orbax's description of a state; raises UserError unless every array in it can be opened."""
    import orbax.checkpoint as ocp

    try:
        return ocp.StandardCheckpointHandler().metadata(LiteralPath(path))
    except (FileNotFoundError, ValueError) as error:
        reason = str(error).partition(" [")[0]
        raise UserError(f"{path} is not a complete checkpoint: {reason}") from error


def _asked_for(like: Any, stored: Any) -> Any:
    """The arrays that orbax is asked for: those of `like`, numbers in the dtype they are stored."""
    found = _described(stored)

    def asked_for(path: Any, leaf: Any) -> Any:
        _, dtype = found.get("/".join(_keys(path)), ((), None))
        if dtype is None or not isinstance(leaf, bool | int | float | complex):
            return _to_array(leaf)
        kinds = {bool: jnp.bool_, int: jnp.integer, float: jnp.floating}
        kind = kinds.get(type(leaf), jnp.complexfloating)
        return np.zeros((), dtype) if jnp.issubdtype(dtype, kind) else _to_array(leaf)

    return jax.tree.map_with_path(asked_for, like)


def storable(state: Any) -> Any:
    """The arrays that are stored for a state; those in host memory are copied."""
    return copy_hosted(jax.tree.map(_to_array, state))


def require_storable(state: Any) -> None:
    """Raises unless every leaf of a state, or of its shapes and dtypes, can be stored."""
    if not jax.tree.leaves(state) or jax.tree_util.all_leaves([state]):
        raise ValueError("The state must be a tree with arrays in it: put a single one in a dict.")
    stored_as: dict[str, str] = {}
    for path, leaf in jax.tree.leaves_with_path(state):
        where, name = jax.tree_util.keystr(path), ".".join(_keys(path))
        if stored_as.setdefault(name, where) != where:
            reason = f"has the name of {stored_as[name]}, because orbax joins keys with dots"
        elif not isinstance(leaf, NUMBERS) and not hasattr(leaf, "dtype"):
            reason = f"is a {type(leaf).__name__}, no array, random key or number"
        elif 0 in np.shape(leaf):
            reason = "is empty, which orbax does not store: leave it out with optax.masked"
        else:
            continue
        raise ValueError(f"{where} {reason}.")


def _to_array(leaf: Any) -> Any:
    """What is stored for a leaf; of a ShapeDtypeStruct, its description."""
    if isinstance(leaf, NUMBERS):
        return np.asarray(leaf)
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    if isinstance(leaf, jax.Array):
        return jax.random.key_data(leaf)
    data = jax.eval_shape(jax.random.key_data, leaf)  # with one more axis
    sharding = getattr(leaf, "sharding", None)
    sharding = sharding if isinstance(sharding, NamedSharding) else None
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)


def _from_array(leaf: Any, array: Any) -> Any:
    """Restores what `_to_array` stored."""
    if isinstance(leaf, NUMBERS):
        return type(leaf)(array.item())
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return array
    implementation = jax.random.key_impl(jax.random.key(0, dtype=leaf.dtype))
    return jax.random.wrap_key_data(array, impl=implementation)


def _require_same(path: Path, stored: Any, like: Any) -> None:
    """Raises unless both trees have the same leaves, shapes and dtypes."""
    found, expected = _described(stored), _described(like)
    only_found, only_expected = found.keys() - expected.keys(), expected.keys() - found.keys()
    if only_found or only_expected:
        raise UserError(
            f"The checkpoint at {path} holds the state of another model or optimizer. Only stored: "
            f"{sorted(only_found)[:5]}; only expected: {sorted(only_expected)[:5]}. Restore it "
            "with the model and the optimizer it was made with."
        )
    for name, (shape, dtype) in expected.items():
        stored_shape, stored_dtype = found[name]
        if (shape, dtype) != (stored_shape, stored_dtype):
            raise UserError(
                f"{name} is stored as {stored_dtype}{list(stored_shape)}, but {dtype}{list(shape)} "
                f"is expected. The checkpoint at {path} was written with another FP8 format, "
                "group size or model; restore it with the model and the Storage it was made with."
            )


def _described(tree: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Path -> shape and dtype. Orbax stores named tuples as dicts, hence the plain path."""
    return {
        "/".join(_keys(path)): (tuple(leaf.shape), jnp.dtype(leaf.dtype).name)
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def _keys(path: Any) -> list[str]:
    """The keys of a path, as orbax names them."""
    return [str(getattr(k, "name", getattr(k, "key", getattr(k, "idx", k)))) for k in path]
