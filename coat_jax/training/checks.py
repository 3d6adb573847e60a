"""What configs refuse when they are made."""

from collections.abc import Iterable
from typing import Any


def require_count(name: str, value: Any, *, least: int = 1) -> None:
    """Raises unless `value` is a whole number of `least` or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number of {least} or more.")


def require_between(name: str, value: Any, low: float, high: float) -> None:
    """Raises unless `value` is a number within these limits."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        upto = "" if high == float("inf") else f" and at most {high:g}"
        raise ValueError(f"{name}={value!r} must be a number of at least {low:g}{upto}.")


def require_choice(name: str, value: Any, choices: Iterable[Any]) -> None:
    """Raises unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}.")
