"""Saves and restores optimizer states, and refuses what does not fit.

Orbax casts what it restores to the dtype it is asked for, without a word. FP8 codes read as
another format, or grouped otherwise than they were written, would be wrong numbers. So
`restore_state` compares the stored shapes and dtypes with the expected ones first. The mesh
may be another one: shardings are those of the expected state.

Orbax is imported when it is needed: it takes longer than all of coat_jax.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp


def save_state(path: str | Path, state: Any) -> None:
    """Writes a state to a new directory at `path`; returns when it is complete."""
    import orbax.checkpoint as ocp

    path = Path(path).absolute()
    if path.exists():
        raise FileExistsError(f"{path} exists already. Choose another path, or remove it first.")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)


def restore_state(path: str | Path, like: Any) -> Any:
    """Reads a state from `path`, with the structure and shardings of `like`.

    Args:
        path: a directory that `save_state` wrote.
        like: the state expected: arrays, or `jax.ShapeDtypeStruct`s, as `jax.eval_shape(tx.init,
            params)` gives them, with shardings where the state is to be sharded.
    """
    import orbax.checkpoint as ocp

    path = Path(path).absolute()
    if not path.is_dir():
        raise FileNotFoundError(f"There is no checkpoint at {path}.")
    with ocp.StandardCheckpointer() as checkpointer:
        stored = checkpointer.metadata(path).item_metadata
        if stored is None:
            raise ValueError(f"{path} is no complete checkpoint: it has no metadata.")
        _require_same(path, stored.tree, like)
        return checkpointer.restore(path, like)


def _require_same(path: Path, stored: Any, like: Any) -> None:
    """Raises unless both trees have the same leaves, shapes and dtypes."""
    found, expected = _described(stored), _described(like)
    only_found, only_expected = found.keys() - expected.keys(), expected.keys() - found.keys()
    if only_found or only_expected:
        raise ValueError(
            f"The checkpoint at {path} holds the state of another model or optimizer. Only stored: "
            f"{sorted(only_found)[:5]}; only expected: {sorted(only_expected)[:5]}. Restore it "
            "with the model and the optimizer it was made with."
        )
    for name, (shape, dtype) in expected.items():
        stored_shape, stored_dtype = found[name]
        if (shape, dtype) != (stored_shape, stored_dtype):
            raise ValueError(
                f"{name} is stored as {stored_dtype}{list(stored_shape)}, but {dtype}{list(shape)} "
                f"is expected. The checkpoint at {path} was written with another FP8 format, "
                "group size or model; restore it with the model and the Storage it was made with."
            )


def _described(tree: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Path -> shape and dtype. Orbax stores named tuples as dicts, hence the plain path."""
    described = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        keys = [str(getattr(k, "name", getattr(k, "key", getattr(k, "idx", k)))) for k in path]
        described["/".join(keys)] = (tuple(leaf.shape), jnp.dtype(leaf.dtype).name)
    return described
