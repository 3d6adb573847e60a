"""The fields of a run's config: their names, the values that they take, their docstrings.

for field in fields(config): print(field.name, field.value)       "optimizer.b1" 0.9
print(explain(config))                                            what --help prints
"""

import dataclasses
import difflib
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

import jax.numpy as jnp
from jax.typing import DTypeLike

from coat_jax import precision
from coat_jax.numerics.minifloat import Minifloat
from coat_jax.training.config import TrainConfig
from coat_jax.training.config.optimizer import Transformation, function_name, is_optimizer
from coat_jax.training.config.run import Metric

SET_BY_MESH = {"model.axes", "model.batch_axes"}
WIDTH = 88
FUNCTIONS = (Transformation | None, Mapping[str, Metric])
# Stands for the annotation of formats, which may also be given as names of simulated ones.
SMALL_FLOAT = "a small float"
# The names that other trainers and earlier versions of this one have for a field.
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
    "writers": "wandb tensorboard report_to use_wandb enable_wandb enable_tensorboard log_to",
    "data.train": "dataset dataset_path train_data",
    "model.remat": "remat_policy activation_checkpointing gradient_checkpointing",
}
FIELD_OF = {alias: field for field, aliases in KNOWN_AS.items() for alias in aliases.split()}


@dataclasses.dataclass(frozen=True)
class Field:
    """A field of a config, or of a config within it.

    Attributes:
        name: its path, as in "optimizer.learning_rate".
        annotation: the type of its values.
        sentence: what the docstring of its class says about it.
        group: whether it is itself a config.
        value: its value, if that is known.
    """

    name: str
    annotation: Any
    sentence: str
    group: bool
    value: Any


def fields(config: TrainConfig | None = None) -> list[Field]:
    """All fields, each nested config before its own fields; with values if `config` is given."""
    return list(_walk(TrainConfig, config, ""))


def _walk(kind: Any, config: Any, prefix: str) -> Iterator[Field]:
    hints, sentences = typing.get_type_hints(kind), _sentences(kind)
    for field in dataclasses.fields(kind):
        name, annotation = prefix + field.name, hints[field.name]
        if kind is precision.Precision and annotation == DTypeLike:
            annotation = SMALL_FLOAT
        if name in SET_BY_MESH:
            continue
        value = default_of(field) if config is None else getattr(config, field.name)
        group = dataclasses.is_dataclass(annotation)
        yield Field(name, annotation, sentences[field.name], group, value)
        if dataclasses.is_dataclass(value) and not isinstance(value, Minifloat):
            yield from _walk(type(value), value, f"{name}.")
        elif group:
            yield from _walk(annotation, None, f"{name}.")


def default_of(field: Any) -> Any:
    """The default of a field; MISSING if it has none."""
    made = field.default_factory is not dataclasses.MISSING
    return field.default_factory() if made else field.default


def _sentences(kind: Any) -> dict[str, str]:
    """What the Attributes section of the docstring says about each field."""
    section = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2]
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, flags=re.MULTILINE)
    described = {name: " ".join(text.split()) for name, text in found}
    return {field.name: described.get(field.name, "") for field in dataclasses.fields(kind)}


def nearest_field(name: str, known: Collection[str]) -> str | None:
    """The field that an unknown name probably means: a known alias, or a similar spelling."""
    if (field := FIELD_OF.get(name.rpartition(".")[2])) in known:
        return field
    short = {path.rpartition(".")[2] for path in known}
    aliases = [alias for alias, field in FIELD_OF.items() if field in known]
    near = difflib.get_close_matches(name, [*known, *short, *aliases], n=1)
    return FIELD_OF.get(near[0], near[0]) if near else None


def kinds_of(annotation: Any) -> tuple[Any, ...]:
    """The kinds of values that a field takes; text comes last, since any word can be text."""
    if annotation in (DTypeLike, SMALL_FLOAT):
        return (annotation,)
    kinds = get_args(annotation) if _is_union(annotation) else (annotation,)
    if precision.Precision in kinds:
        return (precision.Precision,)
    return tuple(sorted(kinds, key=lambda kind: kind is str))


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


# --- In words --------------------------------------------------------------------------------


def explain(config: TrainConfig | None = None) -> str:
    """Every field with its value, the values that it takes, and its sentence, group by group."""
    known = fields(config)
    groups = [field for field in known if field.group]
    lines = ["fields of the run:"]
    lines += _explain_group([field for field in known if "." not in field.name])
    for group in groups:
        lines += ["", *textwrap.wrap(f"{group.name}: {group.sentence}", WIDTH)]
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
        lines.append(f"  --{field.name}{value}    ({describe(field.annotation)})")
        indent = " " * 8
        lines += textwrap.wrap(
            field.sentence, WIDTH, initial_indent=indent, subsequent_indent=indent
        )
    return lines


def describe(annotation: Any) -> str:
    """The values that a field takes, in words."""
    if annotation in FUNCTIONS:
        return "a function, only in a config file"
    return " or ".join(filter(None, map(_describe_one, kinds_of(annotation))))


def _describe_one(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        return f"any number of: {describe(get_args(kind)[0])}"
    if kind is precision.Precision:
        return " or ".join(precision.PRESETS)
    if kind is DTypeLike:
        return "float32 or bfloat16 or float16"
    if kind is SMALL_FLOAT:
        return "E4M3 or E5M2 or another small float, such as E3M4"
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return names.get(kind, "none" if kind is types.NoneType else "")


def show(value: Any) -> str:
    """A value in the form that the command line takes."""
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
    if isinstance(value, Minifloat):
        return value.name
    if dataclasses.is_dataclass(value):
        return type(value).__name__
    return jnp.dtype(value).name
