"""Config files, and the command line's changes to what they say.

    config = load_config("llama_tiny")            config() of a config that comes with the package
    config = load_config("llama_tiny:bf16")       its bf16()
    config = load_config("my/run.py")             config() of any Python file
    config = override(config, ["--learning_rate", "1e-3", "--precision", "coat_lean"])

A field is named by its path, or by its last part where no other field has it. Values are read as
the field's annotation says. A config file is Python and is executed: run those you trust.
"""

import ast
import dataclasses
import difflib
import inspect
import re
import runpy
import textwrap
import traceback
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import jax.numpy as jnp
from jax.typing import DTypeLike

from coat_jax import precision
from coat_jax.errors import UserError
from coat_jax.files import MissingFile, expanded, require_regular, status
from coat_jax.limits import dtype_of, shown
from coat_jax.training.config import (
    Metric,
    TrainConfig,
    Transformation,
    function_name,
    is_optimizer,
)

FUNCTION = "config"
CONFIGS = Path(__file__).parents[1] / "configs"
SHIPPED = {path.stem: path for path in sorted(CONFIGS.glob("*.py")) if path.stem != "__init__"}
SET_BY_MESH = {"model.axes", "model.batch_axes"}
WIDTH = 88
FUNCTIONS = (Transformation | None, Mapping[str, Metric])
BOOLEANS = {"true": True, "false": False}
# What other trainers, and earlier versions of this one, call a field.
KNOWN_AS = {
    "total_steps": "steps max_steps num_steps train_steps max_iters num_iterations epochs",
    "global_batch_size": "batch batch_size train_batch_size total_batch_size",
    "sequence_length": "sequence seq_len seq_length max_seq_len max_seq_length block_size",
    "gradient_accumulation_steps": "accumulation grad_accum_steps grad_accum microbatches "
    "micro_batch_size device_batch_size per_device_batch_size local_batch_size",
    "optimizer.learning_rate": "lr peak peak_lr max_lr",
    "optimizer.warmup_steps": "warmup warmup_ratio warmup_iters warmup_steps_fraction",
    "optimizer.decay_steps": "cooldown cooldown_steps decay decay_ratio warmdown_ratio",
    "optimizer.final_ratio": "final final_lr_frac min_lr min_lr_ratio min_lr_factor",
    "optimizer.clip_norm": "clip grad_clip clip_grad max_norm max_grad_norm "
    "gradient_clipping_threshold",
    "optimizer.weight_decay": "wd",
    "optimizer.b1": "beta1 adam_b1",
    "optimizer.b2": "beta2 adam_b2",
    "optimizer.name": "optimizer_name opt opt_type",
    "evaluation.every": "eval_every eval_interval steps_per_eval",
    "checkpoint.every": "save_every save_steps checkpoint_period save_interval",
    "out": "output out_dir output_dir run_name base_output_directory",
    "data.train": "dataset dataset_path train_data",
    "model.remat": "remat_policy activation_checkpointing gradient_checkpointing",
}
FIELD_OF = {alias: field for field, aliases in KNOWN_AS.items() for alias in aliases.split()}


@dataclasses.dataclass(frozen=True)
class Field:
    """A field of a config, or of a config within it.

    Attributes:
        name: its path, as in "optimizer.learning_rate".
        annotation: what it may hold.
        sentence: what its class's docstring says.
        group: whether it is a config itself.
        value: what it holds, if that is known.
    """

    name: str
    annotation: Any
    sentence: str
    group: bool
    value: Any


# --- Files -----------------------------------------------------------------------------------


def load_config(source: str) -> TrainConfig:
    """What a function of a config returns; FILE is short for FILE:config.

    Args:
        source: a Python file, or the name of a config that comes with the package; with
            `:function` for another function than config().
    """
    file, _, function = source.partition(":")
    path, function = SHIPPED.get(file) or expanded(file), function or FUNCTION
    if not status(path):
        near = difflib.get_close_matches(Path(file).stem, SHIPPED, n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise MissingFile(
            f"There is no config file {file}. {hint}`coat train` alone lists those that come with "
            "the package."
        )
    require_regular(path, "config file")
    try:
        names = runpy.run_path(str(path))
        made = names[function]() if callable(names.get(function)) else None
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        line = f":{lines[-1]}" if lines else ""
        said = _with_hint(f"{type(error).__name__}: {error}")
        raise UserError(f"{file}{line}: {said}") from error
    if not isinstance(made, TrainConfig):
        own = {n: f for n, f in names.items() if inspect.isfunction(f) and n[0] != "_"}
        fitting = [name for name, f in own.items() if f.__module__ == names["__name__"]]
        raise UserError(
            f"{file} has no function {function}() that returns a TrainConfig. Its functions are "
            f"{', '.join(fitting) or 'none'}; choose one with {file}:NAME."
        )
    return made


def list_shipped() -> str:
    """The configs that come with the package, each with the first line of its docstring."""
    lines = []
    for name, path in SHIPPED.items():
        docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "-"
        lines.append(f"  {name:12} {docstring.splitlines()[0]}")
    return "\n".join(lines)


def _with_hint(said: str) -> str:
    """An error, with the field that an unknown argument of a config probably means."""
    pattern = r".*\.__init__\(\) got an unexpected keyword argument '(\w+)'"
    unknown = re.match(pattern, said)
    near = unknown and _nearest(unknown[1], {field.name for field in fields()})
    if not unknown or not near:
        return said
    return f"{unknown[0]}. Did you mean {near.rpartition('.')[2]}?"


# --- The command line ------------------------------------------------------------------------


def override(config: TrainConfig, arguments: Sequence[str]) -> TrainConfig:
    """The config with the fields changed that `--field value` pairs name."""
    known = {field.name: field for field in fields(config)}
    changes: dict[tuple[str, ...], Any] = {}
    for name, texts in _pairs(arguments):
        field = _find(name, known)
        changes[tuple(field.name.split("."))] = _read(field, texts)
    changed: TrainConfig = _changed(config, changes)
    return changed


def _pairs(arguments: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Names without dashes, and what follows each."""
    rest = list(arguments)
    while rest:
        first = rest.pop(0)
        if not first.startswith("--"):
            raise UserError(f"{first!r} belongs to no field: write --field value.")
        name, equals, text = first[2:].partition("=")
        texts = [text] if equals else []
        while not equals and rest and not rest[0].startswith("--"):
            texts.append(rest.pop(0))
        yield name.replace("-", "_"), texts


def _find(name: str, known: dict[str, Field]) -> Field:
    """The field of this name, or with this as the last part of its name."""
    ending = [field for field in known.values() if field.name.endswith(f".{name}")]
    leaves = [field for field in ending if not field.group]
    found = [known[name]] if name in known else leaves or ending
    if not found:
        near = _nearest(name, known)
        hint = f" Did you mean --{near}?" if near else ""
        raise UserError(f"There is no field {shown(name)}.{hint} --help lists them all.")
    if len(found) > 1:
        names = ", ".join(f"--{field.name}" for field in found)
        raise UserError(f"--{name} may be any of {names}: name one of them.")
    if found[0].group:
        inner = [f"--{path}" for path in known if path.startswith(f"{found[0].name}.")]
        raise UserError(f"--{name} is a group of fields: {', '.join(inner[:4])}, ...")
    return found[0]


def _nearest(name: str, known: Collection[str]) -> str | None:
    """The field that an unknown name probably means: one that others call so, or spell alike."""
    if (field := FIELD_OF.get(name.rpartition(".")[2])) in known:
        return field
    short = {path.rpartition(".")[2] for path in known}
    near = difflib.get_close_matches(name, [*known, *short, *FIELD_OF], n=1)
    return FIELD_OF.get(near[0], near[0]) if near else None


def _read(field: Field, texts: list[str]) -> Any:
    """The value that the texts stand for."""
    alternatives = _alternatives(field.annotation)
    if field.annotation in FUNCTIONS:
        raise UserError(f"--{field.name} is a function: set it in the config's file.")
    for kind in alternatives:
        if get_origin(kind) is tuple:
            return tuple(_read_one(field, text, _alternatives(get_args(kind)[0])) for text in texts)
    if len(texts) != 1:
        got = "nothing" if not texts else shown(" ".join(texts))
        raise UserError(
            f"--{field.name} takes one value ({_describe(field.annotation)}), not {got}."
        )
    return _read_one(field, texts[0], alternatives)


def _read_one(field: Field, text: str, alternatives: tuple[Any, ...]) -> Any:
    for kind in alternatives:
        try:
            return _parse(text, kind)
        except (ValueError, TypeError, KeyError):
            continue
    raise UserError(f"--{field.name} {shown(text)} is not {_describe(field.annotation)}.")


def _parse(text: str, kind: Any) -> Any:
    """A text as one kind of value; raises where it is none."""
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
    if kind in (int, float, str):
        return kind(text)
    raise TypeError(kind)


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    """The kinds of value that a field takes; text, which anything is, last."""
    if annotation == DTypeLike:
        return (DTypeLike,)
    kinds = get_args(annotation) if _is_union(annotation) else (annotation,)
    if precision.Precision in kinds:
        return (precision.Precision,)
    return tuple(sorted(kinds, key=lambda kind: kind is str))


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def _changed(value: Any, changes: dict[tuple[str, ...], Any]) -> Any:
    """A dataclass with some leaves changed, all at once: each is checked with the others."""
    own = {path[0]: new for path, new in changes.items() if len(path) == 1}
    for name in {path[0] for path in changes if len(path) > 1}:
        inner = {path[1:]: new for path, new in changes.items() if path[0] == name and path[1:]}
        own[name] = _changed(own.get(name, getattr(value, name)), inner)
    return dataclasses.replace(value, **own)


# --- What there is ---------------------------------------------------------------------------


def fields(config: TrainConfig | None = None) -> list[Field]:
    """Every field, those of inner configs after their group; with values where one is given."""
    return list(_walk(TrainConfig, config, ""))


def _walk(kind: Any, config: Any, prefix: str) -> Iterator[Field]:
    hints, sentences = typing.get_type_hints(kind), _sentences(kind)
    for field in dataclasses.fields(kind):
        name, annotation = prefix + field.name, hints[field.name]
        if name in SET_BY_MESH:
            continue
        value = _default(field) if config is None else getattr(config, field.name)
        group = dataclasses.is_dataclass(annotation)
        yield Field(name, annotation, sentences[field.name], group, value)
        if dataclasses.is_dataclass(value):
            yield from _walk(type(value), value, f"{name}.")
        elif group:
            yield from _walk(annotation, None, f"{name}.")


def _default(field: Any) -> Any:
    """What a field holds that is not given; MISSING if it must be."""
    made = field.default_factory is not dataclasses.MISSING
    return field.default_factory() if made else field.default


def _sentences(kind: Any) -> dict[str, str]:
    """What the docstring's Attributes say of each field."""
    section = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2]
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, flags=re.MULTILINE)
    described = {name: " ".join(text.split()) for name, text in found}
    return {field.name: described.get(field.name, "") for field in dataclasses.fields(kind)}


def explain(config: TrainConfig | None = None) -> str:
    """Every field with its value, what it may be, and its sentence, group by group."""
    known = fields(config)
    groups = [field for field in known if field.group]
    lines = ["fields of the run:"]
    lines += _explain_group([field for field in known if "." not in field.name])
    for group in groups:
        lines += ["", f"{group.name}: {group.sentence}"]
        inside = [f for f in known if f.name.startswith(f"{group.name}.")]
        inner = tuple(f"{g.name}." for g in groups if g.name.startswith(f"{group.name}."))
        lines += _explain_group([f for f in inside if not f.name.startswith(inner)])
    return "\n".join(lines)


def _explain_group(known: Sequence[Field]) -> list[str]:
    lines = []
    for field in known:
        if field.group:
            continue
        value = "" if field.value is dataclasses.MISSING else f" {show(field.value)}"
        lines.append(f"  --{field.name}{value}    ({_describe(field.annotation)})")
        indent = " " * 8
        lines += textwrap.wrap(
            field.sentence, WIDTH, initial_indent=indent, subsequent_indent=indent
        )
    return lines


def _describe(annotation: Any) -> str:
    """What a field takes, in words."""
    if annotation in FUNCTIONS:
        return "a function; in the config's file"
    return " or ".join(filter(None, map(_describe_one, _alternatives(annotation))))


def _describe_one(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        return f"any number of: {_describe(get_args(kind)[0])}"
    if kind is precision.Precision:
        return " or ".join(precision.PRESETS)
    if kind is DTypeLike:
        return "a dtype"
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return names.get(kind, "none" if kind is types.NoneType else "")


def show(value: Any) -> str:
    """A value as the command line takes it."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, precision.Precision):
        return next((n for n, preset in precision.PRESETS.items() if preset == value), "custom")
    if isinstance(value, str | int | float):
        return str(value) if "\n" not in str(value) else repr(value)
    return _show_object(value)


def _show_object(value: Any) -> str:
    if is_optimizer(value):
        return function_name(value)
    if isinstance(value, tuple | Mapping):
        return " ".join(map(show, value))
    if dataclasses.is_dataclass(value):
        return type(value).__name__
    return jnp.dtype(value).name


# --- As Python -------------------------------------------------------------------------------


def source(config: TrainConfig) -> str:
    """A config file that makes this config. Fields that are at their defaults are left out."""
    modules: dict[str, set[str]] = {}
    body = _expression(config, modules, " " * 4)
    imports = [
        f"from {module} import {', '.join(sorted(names))}"
        for module, names in sorted(modules.items())
    ]
    return "\n".join(
        [*imports, "", "", f"def {FUNCTION}() -> TrainConfig:", f"    return {body}", ""]
    )


def _expression(value: Any, modules: dict[str, set[str]], indent: str) -> str:
    """A value as Python; the classes that it needs are added to `modules`."""
    if isinstance(value, precision.Precision) and show(value) in precision.PRESETS:
        return repr(show(value))
    if is_optimizer(value):
        return f"..., # {function_name(value)}"
    if isinstance(value, Mapping):
        return f"..., # {show(value)}"
    if not dataclasses.is_dataclass(value):
        plain = value is None or isinstance(value, str | int | float | tuple)
        return repr(value) if plain else repr(jnp.dtype(value).name)
    kind = type(value)
    modules.setdefault(kind.__module__, set()).add(kind.__name__)
    given = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    changed = {
        f.name: given[f.name] for f in dataclasses.fields(value) if given[f.name] != _default(f)
    }
    inner = indent + " " * 4
    lines = [f"{inner}{name}={_expression(v, modules, inner)}," for name, v in changed.items()]
    return "\n".join([f"{kind.__name__}(", *lines, f"{indent})"]) if lines else f"{kind.__name__}()"
