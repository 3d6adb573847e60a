"""Changes fields of a config from the command line, and explains them.

    config = override(config, ["--learning_rate", "1e-3", "--precision", "coat_lean"])
    print(explain(fields(config)))

A field is named by its path, or by the last parts of the path if no other field has the same. The
field's annotation says how its value is read; the config refuses a value that it does not take.
"""

import contextlib
import dataclasses
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin

from coat_jax import precision
from coat_jax.errors import UserError
from coat_jax.training.config import TrainConfig
from coat_jax.training.config.optimizer import Transformation
from coat_jax.training.config.run import Metric
from coat_jax.training.fields import SYNONYM_OF, Field, fields, nearest_field, show
from coat_jax.validation import brief, describe

FUNCTIONS = (Transformation | None, Mapping[str, Metric])
WORDS = {"true": True, "false": False, "none": None}
WHOLE = re.compile(r"([+-]?[\d_]+)(?:e\+?(\d\d?))?", re.IGNORECASE)
# What people set first.
FIRST = {"data.train", "data.tokenizer", "init_from", "out", "total_steps", "global_batch_size"}
FIRST |= {"sequence_length", "gradient_accumulation_steps", "optimizer.learning_rate"}
FIRST |= {"optimizer.warmup_steps", "model.precision", "model.remat", "evaluation.every"}
FIRST |= {"checkpoint.every", "writers"}


def override(config: TrainConfig, arguments: Sequence[str]) -> TrainConfig:
    """Returns the config after the changes that `--field value` pairs ask for."""
    known = {field.name: field for field in fields(config)}
    given: dict[str, list[str]] = {}
    name = ""
    for word in arguments:
        if word.startswith("--"):
            option, equals, value = word[2:].partition("=")
            name = _find(option, known).name
            given[name] = [value] if equals else []
        elif name and (_is_tuple(known[name]) or not given[name]):
            given[name].append(word)
        else:
            raise UserError(f"{word!r} follows no --field: write --field value.")
    changes = {tuple(name.split(".")): _read(known[name], words) for name, words in given.items()}
    changed: TrainConfig = _change(config, changes)
    return changed


def explain(known: Sequence[Field]) -> str:
    """Lists fields with their values, the values that they take, and sentences, group by group."""
    lines = ["fields of the run:"]
    for field in known:
        if field.group:
            sentence = textwrap.indent(textwrap.fill(field.sentence, 86), "  ")
            lines += ["", f"{field.name}:", sentence, ""]
            continue
        value = "" if field.value is dataclasses.MISSING else show(field.value)
        text = f"{field.sentence} ({_values(field.annotation)})"
        lines.append(f"  --{field.name} {value}".rstrip())
        lines.append(textwrap.indent(textwrap.fill(text, 80), " " * 8))
    return "\n".join(lines)


def first_fields(config: TrainConfig | None = None) -> list[Field]:
    """Returns the fields that people set first."""
    return [field for field in fields(config) if field.name in FIRST]


def _values(annotation: Any) -> str:
    if annotation in FUNCTIONS:
        return "a function, only in a config file"
    if precision.Precision in get_args(annotation):
        return " or ".join(precision.PRESETS)
    if get_origin(annotation) is tuple:
        return f"any number of: {_values(get_args(annotation)[0])}"
    return describe(annotation).replace("'", "")


def _is_tuple(field: Field) -> bool:
    return get_origin(field.annotation) is tuple


def _find(option: str, known: Mapping[str, Field]) -> Field:
    """Returns the field that an option names, by its path, the end of its path or another name."""
    name = option.replace("-", "_")
    name = SYNONYM_OF.get(name, name)
    ending = [field for field in known.values() if field.name.endswith(f".{name}")]
    leaves = [field for field in ending if not field.group]
    found = [known[name]] if name in known else leaves or ending
    if not found:
        near = nearest_field(name, known)
        hint = f" Did you mean --{near}?" if near else ""
        raise UserError(f"There is no field {brief(name)}.{hint} --help-all lists them all.")
    if len(found) > 1:
        names = ", ".join(f"--{field.name}" for field in found)
        raise UserError(f"--{name} may mean any of {names}: choose one of them.")
    if found[0].group:
        inner = [f"--{path}" for path in known if path.startswith(f"{found[0].name}.")]
        raise UserError(f"--{name} is a group of fields: {', '.join(inner[:4])}, ...")
    return found[0]


def _read(field: Field, words: list[str]) -> Any:
    """Returns the value that words stand for; those that stand for none are left to the config."""
    if field.annotation in FUNCTIONS:
        raise UserError(f"--{field.name} is a function: set it in a config file.")
    if _is_tuple(field):
        return tuple(words)
    if not words:
        raise UserError(f"--{field.name} needs a value: write --field value.")
    (text,), kinds = words, get_args(field.annotation) or (field.annotation,)
    if precision.Precision in kinds:
        return precision.precision_of(text)
    named = {str(choice).lower(): choice for kind in kinds for choice in get_args(kind)}
    named |= {word: value for word, value in WORDS.items() if type(value) in kinds}
    if text.lower() in named:
        return named[text.lower()]
    with contextlib.suppress(ValueError):
        if int in kinds and (whole := WHOLE.fullmatch(text)):  # 1e3 is a thousand
            return int(whole[1]) * 10 ** int(whole[2] or 0)
        if float in kinds:
            return float(text)
    return text


def _change(value: Any, changes: dict[tuple[str, ...], Any]) -> Any:
    """Changes fields of a dataclass at once, so that its checks see all the new values."""
    own = {path[0]: new for path, new in changes.items() if len(path) == 1}
    for name in {path[0] for path in changes if len(path) > 1}:
        inner = {path[1:]: new for path, new in changes.items() if path[0] == name and path[1:]}
        own[name] = _change(own.get(name, getattr(value, name)), inner)
    return dataclasses.replace(value, **own)
