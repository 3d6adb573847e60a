"""A config as JSON, and whether a run may go on with another one.

A run may go on over more steps, on another mesh, in another precision. It may not go on with other
parameters or with other rows of data.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from coat_jax.errors import UserError
from coat_jax.training.config import TrainConfig

# What begins with one of the first must stay, unless it begins with one of the second.
FIXED = ("model.", "data.", "optimizer.name", "batch", "sequence", "seed")
FREE = ("model.precision", "model.remat", "model.dtype")
UNIMPORTANT = ("out", "resume", "cache")


def to_json(value: Any) -> Any:
    """A config, or a part of one, in JSON's types."""
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {field.name: to_json(getattr(value, field.name)) for field in fields}
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    if value is None or isinstance(value, str | int | float):
        return value
    return jnp.dtype(value).name


def changes(config: TrainConfig, saved: Mapping[str, Any]) -> list[str]:
    """What a run goes on with that is not as it was saved, one line each.

    Raises:
        UserError: if it cannot go on, naming what differs.
    """
    before, now = dict(_flat(saved)), dict(_flat(to_json(config)))
    names = sorted((before.keys() | now.keys()).difference(UNIMPORTANT))
    differ = [name for name in names if before.get(name) != now.get(name)]
    described = {name: f"{name} was {before.get(name)!r}, now {now.get(name)!r}" for name in differ}
    fatal = [described[name] for name in differ if _is_fixed(name)]
    if fatal:
        raise UserError(
            f"{config.out} holds another run: {'; '.join(fatal[:4])}. Choose another folder with "
            "--out, or begin anew with --resume false, which moves that run out of the way."
        )
    return list(described.values())


def _is_fixed(name: str) -> bool:
    return name.startswith(FIXED) and not name.startswith(FREE)


def _flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its dotted name."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from _flat(value, f"{prefix}.{name}" if prefix else name)
    else:
        yield prefix, tree
