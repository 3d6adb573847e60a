"""Checks the fields of a new config against their annotations.

    @dataclasses.dataclass(frozen=True)
    class Run:
        steps: Count                                          a whole number, 1 or more
        rate: Annotated[float, Between(above=0, most=10)]       a number: neither NaN nor infinite

        def __post_init__(self) -> None:
            require_fields(self)

The same annotations check values in other files (`require`), and build a config from JSON
(`from_json`). Types are checked, too, because a config file may contain any Python.
"""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from coat_jax.errors import UserError

BEFORE = "before"  # in a field's metadata: its value in older configs, which lack the field
MAX_SHOWN = 60  # characters of a value in an error
ConfigType = TypeVar("ConfigType")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Between:
    """The numbers from `least` (or above `above`) to `most` (or below `below`)."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def holds(self, value: float) -> bool:
        """Whether the number is in the range; NaN never is."""
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        if self.least is not None and self.most is not None:
            return f"from {_number(self.least)} to {_number(self.most)}"
        words = {"of at least": self.least, "above": self.above}
        words |= {"at most": self.most, "below": self.below}
        limits = [f"{word} {_number(limit)}" for word, limit in words.items() if limit is not None]
        return " and ".join(limits)


@dataclasses.dataclass(frozen=True)
class Among:
    """These numbers and no others."""

    choices: tuple[int, ...]

    def holds(self, value: float) -> bool:
        """Whether the number is one of them."""
        return value in self.choices

    def __str__(self) -> str:
        return f"among {', '.join(map(str, self.choices))}"


INT32_MAX = 2**31 - 1  # tokens, their positions and counters of steps are int32
Count = Annotated[int, Between(least=1, most=INT32_MAX)]
CountOrZero = Annotated[int, Between(least=0, most=INT32_MAX)]
Seed = Annotated[int, Between(least=0, most=2**32 - 1)]  # JAX truncates larger ones to 32 bits
Share = Annotated[float, Between(least=0, most=1)]


# --- Checking --------------------------------------------------------------------------------


def require_fields(config: Any, prefix: str = "") -> None:
    """Raises UserError unless each field of a dataclass has a value that its annotation allows.

    NumPy's numbers become Python's, so that equal configs are serialized identically.

    Args:
        config: the dataclass, frozen or not.
        prefix: precedes the names of fields in errors, as in "optimizer.".
    """
    allowed = annotations(type(config))
    for field in dataclasses.fields(config):
        given = getattr(config, field.name)
        default = None if field.default is dataclasses.MISSING else field.default
        value = require(prefix + field.name, given, allowed[field.name], default)
        if value is not given:
            object.__setattr__(config, field.name, value)


def require(name: str, value: Any, annotation: Any, default: Any = None) -> Any:
    """Returns a value, with NumPy's numbers as Python's; raises UserError if it is not allowed.

    Args:
        name: the name of the value in the error.
        value: the value.
        annotation: a type, which may have a `Between`.
        default: the default value, which the error mentions if it is a number.
    """
    if isinstance(value, np.bool_ | np.integer | np.floating):
        value = value.item()
    if not _fits(value, annotation):
        proposed = f" The default is {default!r}." if isinstance(default, int | float) else ""
        raise UserError(f"{name}={shown(value)} must be {described(annotation)}.{proposed}")
    return value


def dtype_of(name: str, value: Any) -> np.dtype:
    """The dtype that a value stands for; raises UserError if it is not a dtype."""
    try:
        return jnp.dtype(value)
    except Exception:  # NumPy parses text as Python, which may raise anything
        raise UserError(f"{name}={shown(value)} is not a dtype. Write one as 'bfloat16'.") from None


def annotations(kind: type[Any]) -> dict[str, Any]:
    """The annotation of each field, with its range."""
    return typing.get_type_hints(kind, include_extras=True)


def shown(value: Any) -> str:
    """A value as errors show it: its `repr`, cut if long; for an array, its dtype and shape."""
    if isinstance(value, jax.Array | np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, type):
        return value.__name__
    try:
        text = repr(value)
    except ValueError:  # Python does not print whole numbers of more than 4300 digits
        text = "a number of thousands of digits"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _fits(value: Any, annotation: Any) -> bool:
    if annotation == DTypeLike:
        return True  # the config itself checks which dtypes it takes
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        fits = _fits(value, arguments[0]) and all(limit.holds(value) for limit in arguments[1:])
    elif origin is Literal:
        fits = any(type(value) is type(choice) and value == choice for choice in arguments)
    elif origin in (Union, types.UnionType):
        fits = any(_fits(value, kind) for kind in arguments)
    elif origin is Mapping:
        fits = isinstance(value, Mapping)  # the config itself checks its content
    elif origin is tuple:
        fits = isinstance(value, tuple) and all(_fits(item, arguments[0]) for item in value)
    elif annotation in (int, float):
        number = isinstance(value, int if annotation is int else int | float)
        fits = number and not isinstance(value, bool) and -np.inf < value < np.inf
    else:
        fits = not isinstance(annotation, type) or isinstance(value, annotation)
    return fits


# --- In words --------------------------------------------------------------------------------

NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "True or False",
    type(None): "None",
}
PLURALS = {str: "texts, as in ('a', 'b')"}


def described(annotation: Any) -> str:
    """What an annotation allows, in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        limits = " and ".join(map(str, arguments[1:]))
        return f"{described(arguments[0])} {limits}"
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if origin in (Union, types.UnionType):
        return " or ".join(map(described, arguments))
    if origin is Mapping:
        return "a dict"
    if origin is tuple:
        return f"a tuple of {PLURALS.get(arguments[0]) or described(arguments[0])}"
    name = str(getattr(annotation, "__name__", annotation))
    return NAMES.get(annotation, f"{'an' if name[0] in 'AEIOU' else 'a'} {name}")


def _number(limit: float) -> str:
    return f"{limit:,}" if isinstance(limit, int) else f"{limit:g}"


# --- From JSON -------------------------------------------------------------------------------


def from_json(kind: type[ConfigType], data: Any, where: str) -> ConfigType:
    """Builds a config from JSON, which must have every field except those that were `added` later.

    Args:
        kind: the dataclass of the config.
        data: the JSON object.
        where: the name of its source in errors.
    """
    if not isinstance(data, Mapping):
        raise UserError(f"{where} must be a JSON object, not {shown(data)}.")
    fields = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    data = added_since(kind) | dict(data)
    for problem, names in (("lacks", fields - data.keys()), ("has", data.keys() - fields)):
        if names:
            raise UserError(
                f"{where} {problem} {', '.join(sorted(names)[:5])}: it is damaged, or was written "
                "by another version of coat_jax."
            )
    allowed = annotations(kind)
    values = {
        name: _from_json(value, allowed[name], f"{where}.{name}") for name, value in data.items()
    }
    try:
        return kind(**values)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def added(*, default: Any, before: Any) -> Any:
    """A config field that older JSON lacks: its default now, and its value in older versions."""
    return dataclasses.field(default=default, metadata={BEFORE: before})


def added_since(kind: Any) -> dict[str, Any]:
    """The fields that older JSON of a config (or its class) may lack, with their values then."""
    fields = dataclasses.fields(kind)
    return {field.name: field.metadata[BEFORE] for field in fields if BEFORE in field.metadata}


def _from_json(value: Any, annotation: Any, where: str) -> Any:
    kinds = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else ()
    if isinstance(value, Mapping):
        for kind in kinds or (annotation,):
            if dataclasses.is_dataclass(kind) and isinstance(kind, type):
                return from_json(kind, value, where)
    if isinstance(value, list):
        return tuple(value)
    return value
