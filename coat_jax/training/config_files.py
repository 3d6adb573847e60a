"""Config files: those that come with the package, and those of a user.

    config = load_config("llama_tiny")            config() of a config that comes with the package
    config = load_config("llama_tiny:bf16")       the same in BF16, or bf16() if the file has it
    config = load_config("my/run.py")             config() of any Python file
    text = source(config)                         a Python file that makes this config

A config file is a Python program, which is executed: run only files that you trust.
"""

import dataclasses
import difflib
import inspect
import runpy
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coat_jax import precision
from coat_jax.errors import UserError
from coat_jax.files import MissingFile, expand_user, require_regular
from coat_jax.numerics.minifloat import Minifloat
from coat_jax.training.config import TrainConfig, in_bf16
from coat_jax.training.config.optimizer import is_optimizer
from coat_jax.training.overrides import show
from coat_jax.validation import brief

FUNCTION, BF16 = "config", "bf16"
PACKAGE = Path(__file__).parents[1]
# In a wheel they are in the package, in a checkout beside it. There the package may have a folder
# of this name with nothing but old bytecode.
PLACES = (PACKAGE / "configs", PACKAGE.parent / "configs")
CONFIGS = next(folder for folder in PLACES if (folder / "llama_tiny.py").is_file())
SHIPPED = {path.stem: path for path in sorted(CONFIGS.glob("*.py"))}


def load_config(source: str) -> TrainConfig:
    """Calls a function of a config file, named as above, and returns its config."""
    file, _, function = source.partition(":")
    path, function = SHIPPED.get(file) or expand_user(file), function or FUNCTION
    if not file or not path.exists():
        near = difflib.get_close_matches(Path(file).stem, SHIPPED, n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise MissingFile(
            f"There is no config file {file or source!r}. {hint}`coat train` alone lists those "
            "that come with the package."
        )
    require_regular(path, "config file")
    try:
        names = runpy.run_path(str(path))
        if function == BF16 and function not in names and FUNCTION in names:
            names[BF16] = lambda: in_bf16(names[FUNCTION]())
        config = names[function]() if function in names else None
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        line = f":{lines[-1]}" if lines else ""
        raise UserError(f"{file}{line}: {type(error).__name__}: {error}") from error
    if not isinstance(config, TrainConfig):
        missing = f"{file} has no function {function}() that returns a TrainConfig"
        if function in names:
            raise UserError(f"{missing}: it returned {brief(config)}.")
        own = [name for name, value in names.items() if inspect.isfunction(value)]
        raise UserError(
            f"{missing}. Its functions are {', '.join(own) or 'none'}: choose one with "
            f"{file}:NAME. `coat train llama_tiny --print-config` prints an example."
        )
    return config


def list_shipped() -> str:
    """Lists the configs that come with the package, each with its docstring's first line."""
    titles = {name: path.read_text("utf-8").splitlines()[0] for name, path in SHIPPED.items()}
    return "\n".join(f"  {name:12} {title[3:]}" for name, title in titles.items())


def source(config: TrainConfig) -> str:
    """Writes a config file that makes this config, without fields that have their defaults."""
    modules: dict[str, set[str]] = {}
    body = _expression(config, modules, " " * 4)
    imports = "".join(
        f"from {module} import {', '.join(sorted(names))}\n"
        for module, names in sorted(modules.items())
    )
    return f"{imports}\n\ndef {FUNCTION}() -> TrainConfig:\n    return {body}\n"


def _expression(value: Any, modules: dict[str, set[str]], indent: str) -> str:
    """Returns the Python expression for a value; adds the classes that it needs to `modules`."""
    text = show(value)
    if is_optimizer(value) or isinstance(value, Mapping):
        return f"..., # {text}"
    if isinstance(value, precision.Precision) and text in precision.PRESETS:
        return repr(text)
    if not dataclasses.is_dataclass(value) or isinstance(value, Minifloat):
        plain = value is None or isinstance(value, str | int | float | tuple)
        return repr(value if plain else text)
    kind, inner = type(value), indent + " " * 4
    # Users import a class from the package of its module, where that has it.
    package = kind.__module__.rpartition(".")[0]
    public = getattr(sys.modules.get(package), kind.__name__, None) is kind
    module, name = package if public else kind.__module__, kind.__name__
    imported = name
    if any(name in names for other, names in modules.items() if other != module):
        # Another class has this name: models.Config is one, and models.vision_language.Config.
        module, _, imported = module.rpartition(".")
        name = f"{imported}.{name}"
    modules.setdefault(module, set()).add(imported)
    given = {field: getattr(value, field.name) for field in dataclasses.fields(value)}
    lines = [
        f"{inner}{field.name}={_expression(own, modules, inner)},"
        for field, own in given.items()
        if own not in (field.default, {})
    ]
    return "\n".join([f"{name}(", *lines, f"{indent})"]) if lines else f"{name}()"
