"""Checks the fields of a new config against their annotations.

    @dataclasses.dataclass(frozen=True)
    class Run:
        steps: Count                                          a whole number, 1 or more
        block: Annotated[int, (16, 32)]                         one of these
        rate: Annotated[float, Between(above=0, most=10)]       a number: neither NaN nor infinite

        def __post_init__(self) -> None:
            require_fields(self)

The same annotations check values in other files (`require`), and build a config from JSON
(`from_json`). Types are checked, too, because a config file may contain any Python.
"""

import dataclasses
import math
import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import jax
import numpy as np
from jax.typing import DTypeLike

from coat_jax.errors import UserError

MAX_SHOWN = 60  # characters of a value in an error
ConfigType = TypeVar("ConfigType")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Between:
    """The numbers from `least` (or above `above`) to `most` (or below `below`)."""

    least: float = -math.inf
    above: float = -math.inf
    most: float = math.inf
    below: float = math.inf

    def __contains__(self, value: float) -> bool:
        return self.least <= value <= self.most and self.above < value < self.below

    def __str__(self) -> str:
        if math.isfinite(self.least) and math.isfinite(self.most):
            return f"from {_number(self.least)} to {_number(self.most)}"
        words = {"of at least": self.least, "above": self.above}
        words |= {"at most": self.most, "below": self.below}
        ends = [f"{word} {_number(end)}" for word, end in words.items() if math.isfinite(end)]
        return " and ".join(ends)


def _number(end: float) -> str:
    return f"{end:,}" if isinstance(end, int) else f"{end:g}"


INT32_MAX = 2**31 - 1  # tokens, their positions and counters of steps are int32
Count = Annotated[int, Between(least=1, most=INT32_MAX)]
CountOrZero = Annotated[int, Between(least=0, most=INT32_MAX)]
Seed = Annotated[int, Between(least=0, most=2**32 - 1)]  # JAX truncates larger ones to 32 bits
Share = Annotated[float, Between(least=0, most=1)]


def require_fields(config: Any, prefix: str = "") -> None:
    """Raises UserError unless each field of a dataclass has a value that its annotation allows.

    The names of fields in errors follow `prefix`, as in "optimizer.b1".
    """
    allowed = get_type_hints(type(config), include_extras=True)
    for field in dataclasses.fields(config):
        given = getattr(config, field.name)
        value = require(prefix + field.name, given, allowed[field.name], field.default)
        if value is not given:
            object.__setattr__(config, field.name, value)


def require(name: str, value: Any, annotation: Any, default: Any = None) -> Any:
    """Returns a value that an annotation allows; raises UserError for others, by their name.

    NumPy's numbers become Python's, so that equal configs are serialized identically. The error
    mentions the default if it is a number.
    """
    if isinstance(value, np.bool_ | np.integer | np.floating):
        value = value.item()
    if not _fits(value, annotation):
        proposed = f" The default is {default!r}." if isinstance(default, int | float) else ""
        raise UserError(f"{name}={brief(value)} must be {describe(annotation)}.{proposed}")
    return value


def _fits(value: Any, annotation: Any) -> bool:
    if annotation is Any or annotation == DTypeLike:
        return True  # the config itself checks what it takes
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        fits = _fits(value, arguments[0]) and value in arguments[1]
    elif origin is Literal:
        fits = any(type(value) is type(choice) and value == choice for choice in arguments)
    elif origin in (Union, types.UnionType):
        fits = any(_fits(value, kind) for kind in arguments)
    elif origin is tuple:
        fits = isinstance(value, tuple) and all(_fits(item, arguments[0]) for item in value)
        fits = fits and (arguments[-1] is ... or len(value) == len(arguments))
    elif annotation in (int, float):
        number = isinstance(value, int if annotation is int else int | float)
        fits = number and not isinstance(value, bool) and -math.inf < value < math.inf
    else:  # of a Mapping, the config itself checks the content
        kind = origin if origin is Mapping else annotation
        fits = not isinstance(kind, type) or isinstance(value, kind)
    return fits


NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "True or False",
    type(None): "None",
    tuple[str, ...]: "a tuple of texts, as in ('a', 'b')",
    DTypeLike: "a dtype",
}


def describe(annotation: Any) -> str:
    """Describes the values that an annotation allows."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in NAMES:
        return NAMES[annotation]
    if origin is Annotated:
        kind, limit = arguments
        among = limit if isinstance(limit, Between) else f"among {', '.join(map(str, limit))}"
        return f"{describe(kind)} {among}"
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if origin in (Union, types.UnionType):
        return " or ".join(map(describe, arguments))
    if origin is tuple:
        count = "" if arguments[-1] is ... else f"{len(arguments)}, each "
        return f"a tuple of {count}{describe(arguments[0])}"
    name = "dict" if origin is Mapping else str(getattr(annotation, "__name__", annotation))
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def brief(value: Any) -> str:
    """Returns a value's `repr` for errors, cut if long; of an array, its dtype and shape."""
    if isinstance(value, jax.Array | np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, type):
        return value.__name__
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def from_json(kind: type[ConfigType], data: Any, where: str) -> ConfigType:
    """Builds a config from JSON, which must have every field and is called `where` in errors."""
    if not isinstance(data, Mapping):
        raise UserError(f"{where} must be a JSON object, not {brief(data)}.")
    allowed = get_type_hints(kind, include_extras=True)
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if wrong := names - data.keys() or data.keys() - names:
        listed = ", ".join(brief(name).strip("'") for name in sorted(wrong)[:3])
        raise UserError(
            f"{where} {'lacks' if wrong <= names else 'has'} {listed}: it is damaged, or was "
            "written by another version of coat_jax."
        )
    values = {
        name: _from_json(value, allowed[name], f"{where}.{name}") for name, value in data.items()
    }
    try:
        return kind(**values)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _from_json(value: Any, annotation: Any, where: str) -> Any:
    for kind in (annotation, *get_args(annotation)):
        if isinstance(value, Mapping) and isinstance(kind, type) and dataclasses.is_dataclass(kind):
            return from_json(kind, value, where)
    if isinstance(value, list):
        return tuple(_from_json(item, Any, where) for item in value)
    return value
