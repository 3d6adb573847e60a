"""Config files: those that come with the package, and those of a user.

    config = load_config("llama_tiny")            config() of a config that comes with the package
    config = load_config("llama_tiny:bf16")       bf16() of the same file
    config = load_config("my/run.py")             config() of any Python file
    text = source(config)                         a Python file that makes this config

A config file is a Python program, which is executed: run only files that you trust.
"""

import ast
import dataclasses
import difflib
import inspect
import re
import runpy
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from coat_jax import precision
from coat_jax.errors import UserError
from coat_jax.files import MissingFile, expanded, is_folder, require_regular, status
from coat_jax.limits import shown
from coat_jax.numerics.minifloat import Minifloat
from coat_jax.training.config import TrainConfig
from coat_jax.training.config.optimizer import function_name, is_optimizer
from coat_jax.training.fields import FIELD_OF, default_of, fields, nearest_field, show

FUNCTION = "config"
CONFIGS = Path(__file__).parents[1] / "configs"
SHIPPED = {path.stem: path for path in sorted(CONFIGS.glob("*.py")) if path.stem != "__init__"}


def load_config(source: str) -> TrainConfig:
    """Calls a function of a config file, and returns its config.

    Args:
        source: a Python file, or the name of a config that comes with the package. A suffix
            `:function` calls another function than config().
    """
    file, _, function = source.partition(":")
    if not file:
        raise UserError(f"{source!r} names no config: write it before the colon.")
    path, function = SHIPPED.get(file) or expanded(file), function or FUNCTION
    if not status(path):
        near = difflib.get_close_matches(Path(file).stem, SHIPPED, n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise MissingFile(
            f"There is no config file {file}. {hint}`coat train` alone lists those that come with "
            "the package."
        )
    if is_folder(path):
        raise UserError(
            f"{file} is a folder. A run that begins from the model in it has a config file, with "
            f"model=coat_jax.models.hf.read_config({file!r}) and init_from={file!r}."
        )
    require_regular(path, "config file")
    try:
        names = runpy.run_path(str(path))
        made = names[function]() if callable(names.get(function)) else None
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        line = f":{lines[-1]}" if lines else ""
        message = _with_hint(f"{type(error).__name__}: {error}")
        raise UserError(f"{file}{line}: {message}") from error
    if not isinstance(made, TrainConfig):
        raise UserError(_why_no_config(file, function, names, made))
    return made


def list_shipped() -> str:
    """The configs that come with the package, each with the first line of its docstring."""
    lines = []
    for name, path in SHIPPED.items():
        docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "-"
        lines.append(f"  {name:12} {docstring.splitlines()[0]}")
    return "\n".join(lines)


def _why_no_config(file: str, function: str, names: Mapping[str, Any], made: Any) -> str:
    """What to do about a file whose function is missing, or does not return a config."""
    if callable(names.get(function)):
        return f"{function}() of {file} returns {shown(made)}, and must return a TrainConfig."
    own = {n: f for n, f in names.items() if inspect.isfunction(f) and n[0] != "_"}
    fitting = [name for name, f in own.items() if f.__module__ == names["__name__"]]
    remedy = f"Its functions are {', '.join(fitting)}; choose one with {file}:NAME."
    if not fitting:
        remedy = "Write one; `coat train llama_tiny --print-config` prints an example."
    return f"{file} has no function {function}() that returns a TrainConfig. {remedy}"


def _with_hint(message: str) -> str:
    """An error's text; after an unknown argument of a config, the field that is probably meant."""
    pattern = r"TypeError: (\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'"
    unknown = re.match(pattern, message)
    if not unknown:
        return message
    kind, name = unknown.groups()
    classes = {"": TrainConfig.__name__, "model.precision": precision.Precision.__name__}
    classes |= {field.name: field.annotation.__name__ for field in fields() if field.group}
    class_of = {field.name: classes[field.name.rpartition(".")[0]] for field in fields()}
    if near := nearest_field(name, {path for path, owner in class_of.items() if owner == kind}):
        return f"{unknown[0]}. Did you mean {near.rpartition('.')[2]}?"
    meant = FIELD_OF.get(name, name).rpartition(".")[2]
    owners = {owner: 0 for path, owner in class_of.items() if path.rpartition(".")[2] == meant}
    if kind not in class_of.values() or not owners:
        return message
    hint = "" if meant == name else f" Did you mean {meant}?"
    return f"{unknown[0]}.{hint} It is a field of {' or '.join(owners)}."


def source(config: TrainConfig) -> str:
    """The text of a config file that makes this config, without fields that have their defaults."""
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
    """The Python expression for a value; adds the classes that it needs to `modules`."""
    if isinstance(value, precision.Precision) and show(value) in precision.PRESETS:
        return repr(show(value))
    if is_optimizer(value):
        return f"..., # {function_name(value)}"
    if isinstance(value, Mapping):
        return f"..., # {show(value)}"
    if isinstance(value, Minifloat):
        return repr(value.name)
    if not dataclasses.is_dataclass(value):
        plain = value is None or isinstance(value, str | int | float | tuple)
        return repr(value) if plain else repr(jnp.dtype(value).name)
    kind = type(value)
    modules.setdefault(_package_of(kind), set()).add(kind.__name__)
    given = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    changed = {
        f.name: given[f.name] for f in dataclasses.fields(value) if given[f.name] != default_of(f)
    }
    inner = indent + " " * 4
    lines = [f"{inner}{name}={_expression(v, modules, inner)}," for name, v in changed.items()]
    return "\n".join([f"{kind.__name__}(", *lines, f"{indent})"]) if lines else f"{kind.__name__}()"


def _package_of(kind: type) -> str:
    """Where users import a class from: the outermost package that has it by its name."""
    module: str = kind.__module__
    while (package := module.rpartition(".")[0]) and (
        getattr(sys.modules[package], kind.__name__, None) is kind
    ):
        module = package
    return module
