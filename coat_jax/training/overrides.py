"""The fields of a run's config: changes them from the command line, and explains them.

    config = override(config, ["--learning_rate", "1e-3", "--precision", "coat_lean"])
    for field in fields(config): print(field.name, field.value)       "optimizer.b1" 0.9
    print(explain(fields(config)))

A field is named by its path, or by the last parts of the path if no other field has the same. The
field's annotation says how its value is read; the config refuses a value that it does not take.
"""

import contextlib
import dataclasses
import difflib
import inspect
import re
import textwrap
import typing
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args, get_origin

from coat_jax import precision
from coat_jax.errors import UserError
from coat_jax.models import ModelConfig
from coat_jax.numerics.minifloat import Minifloat
from coat_jax.training.config import TrainConfig, to_json
from coat_jax.training.config.optimizer import Transformation
from coat_jax.training.config.run import Metric
from coat_jax.validation import brief, describe

SET_BY_MESH = {"model.axes", "model.batch_axes"}
# A model says these for all its parts.
OF_WHOLE_MODEL = {field.name for field in dataclasses.fields(ModelConfig)}
# The names that other trainers have for a field. The command line takes them, too.
SYNONYMS = {
    "total_steps": "steps max_steps num_steps train_steps max_iters",
    "sequence_length": "seq_len seq_length max_seq_len block_size",
    "gradient_accumulation_steps": "grad_accum_steps grad_accum accumulation",
    "optimizer.learning_rate": "lr max_lr",
    "optimizer.warmup_steps": "warmup warmup_iters",
    "optimizer.clip_norm": "grad_clip clip_grad max_grad_norm",
    "optimizer.weight_decay": "wd",
    "optimizer.b1": "beta1",
    "optimizer.b2": "beta2",
    "evaluation.every": "eval_every eval_interval",
    "checkpoint.every": "save_every save_steps save_interval",
    "out": "out_dir output_dir",
}
SYNONYM_OF = {other: field for field, others in SYNONYMS.items() for other in others.split()}
FUNCTIONS = (Transformation | None, Mapping[str, Metric])
WORDS = {"true": True, "false": False, "none": None}
# What people set first.
FIRST = {"data.train", "data.tokenizer", "init_from", "out", "total_steps", "global_batch_size"}
FIRST |= {"sequence_length", "gradient_accumulation_steps", "optimizer.learning_rate"}
FIRST |= {"optimizer.warmup_steps", "model.precision", "model.remat", "evaluation.every"}
FIRST |= {"checkpoint.every", "writers"}


class Field(NamedTuple):
    """A field of a config, or of a config within it."""

    name: str  # its path, as in "optimizer.learning_rate"
    annotation: Any
    owner: type[Any]  # the class that has the field
    group: bool  # whether it is itself a config
    value: Any

    @property
    def sentence(self) -> str:
        """The text on the field in the docstring of its class."""
        return _sentences(self.owner).get(self.name.rpartition(".")[2], "")


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
        elif name and (not given[name] or _items(known[name].annotation)):
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
        text = f"{field.sentence} ({_values(field.annotation)})"
        lines.append(f"  --{field.name} {show(field.value)}".rstrip())
        lines.append(textwrap.indent(textwrap.fill(text, 80), " " * 8))
    return "\n".join(lines)


def fields(config: Any, prefix: str = "") -> list[Field]:
    """Returns all fields of a config, and those of each nested config after it."""
    hints = typing.get_type_hints(type(config))
    own: list[Field] = []
    groups: list[Field] = []
    for one in dataclasses.fields(config):
        name, value, hint = prefix + one.name, getattr(config, one.name), hints[one.name]
        of_part = prefix.startswith("model.") and prefix != "model."
        if name in SET_BY_MESH or (of_part and one.name in OF_WHOLE_MODEL):
            continue
        group = dataclasses.is_dataclass(hint) or hint is Any
        listed = groups if group else own
        listed.append(Field(name, hint, type(config), group, value))
        if dataclasses.is_dataclass(value) and not isinstance(value, Minifloat):
            listed += fields(value, f"{name}.")
    return own + groups


def _sentences(kind: Any) -> dict[str, str]:
    """Returns the sentences on fields in the Attributes sections of a class and of its bases."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        section = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")[2]
        items = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, flags=re.MULTILINE)
        found |= {name: " ".join(text.split()) for name, text in items}
    return found


def show(value: Any) -> str:
    """Returns a value in the form that the command line takes."""
    if isinstance(value, precision.Precision):
        return next((n for n, preset in precision.PRESETS.items() if preset == value), "custom")
    if dataclasses.is_dataclass(value) and not isinstance(value, Minifloat):
        return type(value).__name__
    if isinstance(value, tuple | Mapping):
        return " ".join(map(show, value))
    text = str(to_json(value))
    return repr(text) if "\n" in text else text


def _values(annotation: Any) -> str:
    if annotation in FUNCTIONS:
        return "a function, only in a config file"
    if precision.Precision in get_args(annotation):
        return " or ".join(precision.PRESETS)
    if items := _items(annotation):
        count = "any number" if items[-1] is ... else len(items)
        return f"{count} of: {_values(items[0])}"
    return describe(annotation).replace("'", "")


def _find(option: str, known: Mapping[str, Field]) -> Field:
    """Returns the field that an option names, by its path, the end of its path or another name."""
    name = option.replace("-", "_")
    name = SYNONYM_OF.get(name, name)
    ending = [field for field in known.values() if field.name.endswith(f".{name}")]
    leaves = [field for field in ending if not field.group]
    found = [known[name]] if name in known else leaves or ending
    if not found:
        paths = SYNONYM_OF | {path.rpartition(".")[2]: path for path in known}
        near = difflib.get_close_matches(name.rpartition(".")[2], paths, n=1)
        hint = f" Did you mean --{paths[near[0]]}?" if near else ""
        raise UserError(f"There is no field {brief(name)}.{hint} --help-all lists them all.")
    if len(found) > 1:
        names = ", ".join(f"--{field.name}" for field in found)
        raise UserError(f"--{name} may mean any of {names}: choose one of them.")
    return found[0]


def _read(field: Field, words: list[str]) -> Any:
    """Returns the value that words stand for; those that stand for none are left to the config."""
    items = _items(field.annotation)
    if items and (words != ["none"] or type(None) not in get_args(field.annotation)):
        return tuple(_read_word(items[0], word) for word in words)
    if not words:
        raise UserError(f"--{field.name} needs a value: write --field value.")
    return _read_word(field.annotation, words[0])


def _items(annotation: Any) -> tuple[Any, ...]:
    """The kinds of the items if a field takes a tuple, perhaps among other values."""
    tuples = (kind for kind in (annotation, *get_args(annotation)) if get_origin(kind) is tuple)
    return get_args(next(tuples, None))


def _read_word(annotation: Any, text: str) -> Any:
    kinds = get_args(annotation) or (annotation,)
    named = {word: value for word, value in WORDS.items() if type(value) in kinds}
    if text.lower() in named:
        return named[text.lower()]
    if precision.Precision in kinds:
        return precision.precision_of(text)
    if int in kinds or float in kinds:
        with contextlib.suppress(ValueError):
            number = float(text)
            # 1e3 is a thousand, but 1.0 a share.
            whole = int in kinds and "." not in text and number.is_integer()
            return int(number) if whole else number
    return text


def _change(value: Any, changes: dict[tuple[str, ...], Any]) -> Any:
    """Changes fields of a dataclass at once, so that its checks see all the new values."""
    own = {path[0]: new for path, new in changes.items() if len(path) == 1}
    for name in {path[0] for path in changes if len(path) > 1}:
        inner = {path[1:]: new for path, new in changes.items() if path[0] == name and path[1:]}
        own[name] = _change(own.get(name, getattr(value, name)), inner)
    return dataclasses.replace(value, **own)
