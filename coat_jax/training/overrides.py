"""Changes fields of a config from the command line, and explains them.

    config = override(config, ["--learning_rate", "1e-3", "--precision", "coat_lean"])
    print(explain(fields(config)))

A field is named by its path, or by the last parts of the path if no other field has the same. The
field's annotation says how its value is read; the config refuses a value that it does not take.
"""

import argparse
import contextlib
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, get_args, get_origin

from coat_jax import precision
from coat_jax.errors import UserError
from coat_jax.training.config import TrainConfig
from coat_jax.training.config.optimizer import Transformation
from coat_jax.training.config.run import Metric
from coat_jax.training.fields import SYNONYM_OF, Field, fields, nearest_field, show
from coat_jax.validation import describe, shown

FUNCTIONS = (Transformation | None, Mapping[str, Metric])
WORDS = {"true": True, "false": False, "none": None}
WHOLE = re.compile(r"([+-]?[\d_]+)(?:e\+?(\d\d?))?", re.IGNORECASE)
# What people set first.
FIRST = {"data.train", "data.tokenizer", "init_from", "out", "total_steps", "global_batch_size"}
FIRST |= {"sequence_length", "gradient_accumulation_steps", "optimizer.learning_rate"}
FIRST |= {"optimizer.warmup_steps", "model.precision", "model.remat", "evaluation.every"}
FIRST |= {"checkpoint.every", "writers"}


def override(config: TrainConfig, arguments: Sequence[str]) -> TrainConfig:
    """The config after the changes that `--field value` pairs ask for."""
    known = {field.name: field for field in fields(config)}
    given, rest = _parser([*known.values()]).parse_known_args(
        [_spell_out(word, known) if word.startswith("--") else word for word in arguments]
    )
    if rest:
        raise UserError(f"{rest[0]!r} follows no --field: write --field value.")
    changes = {
        tuple(name.split(".")): _read(known[name], text) for name, text in vars(given).items()
    }
    changed: TrainConfig = _change(config, changes)
    # Also those that are given the value that they have.
    changed.optimizer.require_used([path[1] for path in changes if path[0] == "optimizer"])
    return changed


def explain(known: Sequence[Field]) -> str:
    """Fields with their values, the values that they take, and their sentences, group by group."""
    return _parser(known).format_help().strip()


def first_fields(config: TrainConfig | None = None) -> list[Field]:
    """The fields that people set first."""
    return [field for field in fields(config) if field.name in FIRST]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')}.")


def _parser(known: Sequence[Field]) -> _Parser:
    parser = _Parser(
        usage=argparse.SUPPRESS,
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=8, width=88),
    )
    groups: dict[str, Any] = {"": parser.add_argument_group("fields of the run")}
    for field in known:
        if field.group:
            groups[f"{field.name}."] = parser.add_argument_group(field.name, field.sentence)
            continue
        value = "" if field.value is dataclasses.MISSING else show(field.value)
        several = get_origin(field.annotation) is tuple
        groups[max(filter(field.name.startswith, groups), key=len)].add_argument(
            f"--{field.name}",
            nargs="*" if several else None,
            metavar=value or ("TEXT" if several else ""),
            help=f"{field.sentence} ({_values(field.annotation)})".replace("%", "%%"),
        )
    return parser


def _values(annotation: Any) -> str:
    if annotation in FUNCTIONS:
        return "a function, only in a config file"
    if precision.Precision in get_args(annotation):
        return " or ".join(precision.PRESETS)
    if get_origin(annotation) is tuple:
        return f"any number of: {_values(get_args(annotation)[0])}"
    return describe(annotation).replace("'", "")


def _spell_out(word: str, known: Mapping[str, Field]) -> str:
    """An argument --field or --field=value with the field's path."""
    given, equals, value = word[2:].partition("=")
    name = given.replace("-", "_")
    name = SYNONYM_OF.get(name, name)
    ending = [field for field in known.values() if field.name.endswith(f".{name}")]
    leaves = [field for field in ending if not field.group]
    found = [known[name]] if name in known else leaves or ending
    if not found:
        near = nearest_field(name, known)
        hint = f" Did you mean --{near}?" if near else ""
        raise UserError(f"There is no field {shown(name)}.{hint} --help-all lists them all.")
    if len(found) > 1:
        names = ", ".join(f"--{field.name}" for field in found)
        raise UserError(f"--{name} may mean any of {names}: choose one of them.")
    if found[0].group:
        inner = [f"--{path}" for path in known if path.startswith(f"{found[0].name}.")]
        raise UserError(f"--{name} is a group of fields: {', '.join(inner[:4])}, ...")
    return f"--{found[0].name}{equals}{value}"


def _read(field: Field, text: str | list[str]) -> Any:
    """The value that a text stands for; a text that stands for none is left to the config."""
    kinds = get_args(field.annotation) or (field.annotation,)
    if field.annotation in FUNCTIONS:
        raise UserError(f"--{field.name} is a function: set it in a config file.")
    if isinstance(text, list):
        return tuple(text)
    if precision.Precision in kinds:
        return precision.precision_of(text)
    words = {word: value for word, value in WORDS.items() if type(value) in kinds}
    if text.lower() in words:
        return words[text.lower()]
    with contextlib.suppress(ValueError):
        if int in kinds and (whole := WHOLE.fullmatch(text)):  # 1e3 is a thousand
            return int(whole[1]) * 10 ** int(whole[2] or 0)
        if float in kinds:
            return float(text)
    return text


def _change(value: Any, changes: dict[tuple[str, ...], Any]) -> Any:
    """A dataclass with some fields changed at once, so that checks see all the new values."""
    own = {path[0]: new for path, new in changes.items() if len(path) == 1}
    for name in {path[0] for path in changes if len(path) > 1}:
        inner = {path[1:]: new for path, new in changes.items() if path[0] == name and path[1:]}
        own[name] = _change(own.get(name, getattr(value, name)), inner)
    return dataclasses.replace(value, **own)
