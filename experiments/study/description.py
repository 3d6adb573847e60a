"""Dataclasses as JSON, which names a row of results, and in words, for a list of arms."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from coat_jax.numerics.minifloat import Minifloat
from coat_jax.precision import PRESETS, Precision


def described(value: Any, *, types: bool = True) -> Any:
    """A value as JSON: every field of a dataclass, so that a changed default is another arm.

    Args:
        value: of dataclasses, containers, numbers, text and formats.
        types: whether dataclasses have their type under "is".
    """
    if isinstance(value, Minifloat):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        if isinstance(value, Precision):
            # By its earlier name, where it says the same: runs of then are not made again.
            products = fields.pop("forward_products")
            fields["int8_forward"] = products == "int8"
            fields |= {"forward_products": products} if products == "bf16" else {}
        name = {"is": type(value).__name__} if types else {}
        return name | described(fields, types=types)
    if isinstance(value, Mapping):
        return {key: described(entry, types=types) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return [described(entry, types=types) for entry in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return getattr(value, "__name__", None) or str(value)


def differences(thing: Any) -> str:
    """The fields of a dataclass that differ from its defaults, in words."""
    default = type(thing)()
    return ", ".join(
        f"{field.name}={_in_words(getattr(thing, field.name))}"
        for field in dataclasses.fields(thing)
        if getattr(thing, field.name) != getattr(default, field.name)
    )


def _in_words(value: Any) -> str:
    preset = next((name for name, known in PRESETS.items() if known == value), None)
    if preset is not None:
        return preset.upper()
    known = described(value)
    if isinstance(known, dict) and "is" in known:
        return f"{known['is']}({differences(value)})"
    return str(known)
