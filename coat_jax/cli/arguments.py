"""Arguments that several commands take."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from coat_jax.errors import UserError
from coat_jax.precision import PRESETS

STEP = "step of a run's checkpoint; by default the newest intact one"


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments that choose a model, its tokenizer and its precision."""
    add = parser.add_argument
    add("where", type=Path, metavar="WHERE", help="the folder of a model")
    add("--tokenizer", metavar="FILE", help='a tokenizer.json, or "bytes"')
    add("--precision", help=f"one of {', '.join(PRESETS)}")
    add("--step", type=int, help=STEP)


def add_count(parser: argparse.ArgumentParser, name: str, default: int | None, help: str) -> None:
    """Declares an option that takes a whole number from 1."""
    help += "" if default is None else f" (default: {default:,})"
    parser.add_argument(name, type=_count, default=default, metavar="N", help=help)


def require_effects(options: argparse.Namespace, effects: Sequence[tuple[str, bool, str]]) -> None:
    """Raises for an option that is given and has no effect with the others.

    Args:
        options: None where an option is not given.
        effects: names of options, whether they have an effect, and what they are for.
    """
    for name, has_effect, purpose in effects:
        if getattr(options, name) is not None and not has_effect:
            raise UserError(f"--{name.replace('_', '-')} is for {purpose}: leave it out.")


def _count(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} must be 1 or more")
    return number


_count.__name__ = "int"  # argparse says "invalid int value"
