"""Changes fields of a config from the command line.

    config = override(config, ["--learning_rate", "1e-3", "--precision", "coat_lean"])

A field is named by its path, or by the last part of the path if no other field has the same. The
field's annotation says how its value is read.
"""

import dataclasses
import types
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args, get_origin

from jax.typing import DTypeLike

from coat_jax import precision
from coat_jax.errors import UserError
from coat_jax.limits import dtype_of, shown
from coat_jax.training.config import TrainConfig
from coat_jax.training.fields import (
    FUNCTIONS,
    SMALL_FLOAT,
    Field,
    describe,
    fields,
    kinds_of,
    nearest_field,
)

BOOLEANS = {"true": True, "false": False}
# What to do about a value that a field does not take.
ADVICE = {
    "optimizer.name": " Set any other optimizer in a config file, as optimizer.transformation."
}
READERS: dict[Any, Any] = {int: int, float: float, str: str, SMALL_FLOAT: str}


def override(config: TrainConfig, arguments: Sequence[str]) -> TrainConfig:
    """The config after the changes that `--field value` pairs ask for."""
    known = {field.name: field for field in fields(config)}
    changes: dict[tuple[str, ...], Any] = {}
    for name, texts in _pairs(arguments):
        field = _find(name, known)
        changes[tuple(field.name.split("."))] = _read(field, texts)
    changed: TrainConfig = _changed(config, changes)
    # Also those that are given the value that they have.
    changed.optimizer.require_used([path[1] for path in changes if path[0] == "optimizer"])
    return changed


def _pairs(arguments: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each name without its dashes, and the words that follow it."""
    rest = list(arguments)
    while rest:
        first = rest.pop(0)
        if not first.startswith("--"):
            raise UserError(f"{first!r} follows no --field: write --field value.")
        name, equals, text = first[2:].partition("=")
        texts = [text] if equals else []
        while not equals and rest and not rest[0].startswith("--"):
            texts.append(rest.pop(0))
        yield name.replace("-", "_"), texts


def _find(name: str, known: dict[str, Field]) -> Field:
    """The field with this name, or with this as the last part of its name."""
    ending = [field for field in known.values() if field.name.endswith(f".{name}")]
    leaves = [field for field in ending if not field.group]
    found = [known[name]] if name in known else leaves or ending
    if not found:
        near = nearest_field(name, known)
        hint = f" Did you mean --{near}?" if near else ""
        raise UserError(f"There is no field {shown(name)}.{hint} --help lists them all.")
    if len(found) > 1:
        names = ", ".join(f"--{field.name}" for field in found)
        raise UserError(f"--{name} may mean any of {names}: choose one of them.")
    if found[0].group:
        inner = [f"--{path}" for path in known if path.startswith(f"{found[0].name}.")]
        raise UserError(f"--{name} is a group of fields: {', '.join(inner[:4])}, ...")
    return found[0]


def _read(field: Field, texts: list[str]) -> Any:
    """The value of a field, from the words after its name."""
    if field.annotation in FUNCTIONS:
        raise UserError(f"--{field.name} is a function: set it in a config file.")
    for kind in kinds_of(field.annotation):
        if get_origin(kind) is tuple:
            return tuple(_read_one(field.name, text, get_args(kind)[0]) for text in texts)
    if len(texts) != 1:
        got = "nothing" if not texts else shown(" ".join(texts))
        raise UserError(
            f"--{field.name} takes one value ({describe(field.annotation)}), not {got}."
        )
    return _read_one(field.name, texts[0], field.annotation)


def _read_one(name: str, text: str, annotation: Any) -> Any:
    for kind in kinds_of(annotation):
        try:
            return _parse(text, kind)
        except (ValueError, TypeError, KeyError):
            continue
    advice = ADVICE.get(name, "")
    raise UserError(f"--{name} {shown(text)} is not {describe(annotation)}.{advice}")


def _parse(text: str, kind: Any) -> Any:
    """A word as one kind of value; raises if it is not one."""
    if get_origin(kind) is Literal:
        return {str(choice): choice for choice in get_args(kind)}[text]
    if kind is types.NoneType:
        return {"none": None}[text.lower()]
    if kind is bool:
        return BOOLEANS[text.lower()]
    if kind is precision.Precision:
        return precision.precision_of(text)
    if kind is DTypeLike:
        return dtype_of("dtype", text)
    return READERS[kind](text)


def _changed(value: Any, changes: dict[tuple[str, ...], Any]) -> Any:
    """A dataclass with some fields changed at once, so that checks see all the new values."""
    own = {path[0]: new for path, new in changes.items() if len(path) == 1}
    for name in {path[0] for path in changes if len(path) > 1}:
        inner = {path[1:]: new for path, new in changes.items() if path[0] == name and path[1:]}
        own[name] = _changed(own.get(name, getattr(value, name)), inner)
    return dataclasses.replace(value, **own)
