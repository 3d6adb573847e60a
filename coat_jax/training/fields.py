"""The fields of a run's config: their names, their values, what their docstrings say.

for field in fields(config): print(field.name, field.value)       "optimizer.b1" 0.9
"""

import dataclasses
import difflib
import inspect
import re
import typing
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from coat_jax import precision
from coat_jax.models import Config
from coat_jax.numerics.minifloat import Minifloat
from coat_jax.training.config import TrainConfig
from coat_jax.training.config.optimizer import function_name, is_optimizer
from coat_jax.training.data import DataConfig

SET_BY_MESH = {"model.axes", "model.batch_axes"}
USUAL = {"model": Config, "data": DataConfig}  # without a config, its usual parts are listed
# The names that other trainers have for a field. The command line takes them, too.
SYNONYMS = {
    "total_steps": "steps max_steps num_steps train_steps max_iters num_iterations",
    "sequence_length": "seq_len seq_length max_seq_len max_seq_length block_size",
    "gradient_accumulation_steps": "grad_accum_steps grad_accum accumulation microbatches",
    "optimizer.learning_rate": "lr peak_lr max_lr",
    "optimizer.warmup_steps": "warmup_iters",
    "optimizer.final_ratio": "min_lr_ratio final_lr_frac",
    "optimizer.clip_norm": "grad_clip clip_grad max_grad_norm gradient_clipping_threshold",
    "optimizer.weight_decay": "wd",
    "optimizer.b1": "beta1 adam_b1",
    "optimizer.b2": "beta2 adam_b2",
    "evaluation.every": "eval_every eval_interval steps_per_eval",
    "checkpoint.every": "save_every save_steps save_interval checkpoint_period",
    "out": "out_dir output_dir",
}
# Names of something else, in other units, for which a field is suggested.
RELATED = {
    "total_steps": "epochs",
    "global_batch_size": "batch batch_size train_batch_size total_batch_size",
    "gradient_accumulation_steps": "micro_batch_size device_batch_size per_device_batch_size",
    "optimizer.learning_rate": "peak",
    "optimizer.warmup_steps": "warmup warmup_ratio warmup_steps_fraction",
    "optimizer.decay_steps": "cooldown cooldown_steps decay decay_ratio warmdown_ratio",
    "optimizer.final_ratio": "final min_lr min_lr_factor",
    "optimizer.name": "opt opt_type",
    "out": "output run_name base_output_directory",
    "writers": "wandb tensorboard report_to use_wandb enable_wandb enable_tensorboard log_to",
    "data.train": "dataset dataset_path train_data",
    "model.remat": "remat_policy activation_checkpointing gradient_checkpointing",
}
SYNONYM_OF = {other: field for field, others in SYNONYMS.items() for other in others.split()}
FIELD_OF = {other: field for field, others in RELATED.items() for other in others.split()}
FIELD_OF |= SYNONYM_OF


class Field(NamedTuple):
    """A field of a config, or of a config within it.

    Attributes:
        name: its path, as in "optimizer.learning_rate".
        annotation: the type of its values.
        sentence: what the docstring of its class says about it.
        group: whether it is itself a config.
        value: its value; MISSING if it is not known.
    """

    name: str
    annotation: Any
    sentence: str
    group: bool
    value: Any


def fields(config: Any = None, kind: Any = TrainConfig, prefix: str = "") -> list[Field]:
    """Returns all fields of a config of this kind, and those of each nested config after it.

    They have values if `config` is given, and `prefix` stands before their names.
    """
    hints, sentences = typing.get_type_hints(kind), _sentences(kind)
    own: list[Field] = []
    groups: list[Field] = []
    for one in dataclasses.fields(kind):
        name = prefix + one.name
        if name in SET_BY_MESH:
            continue
        value = default_of(one) if config is None else getattr(config, one.name)
        annotation = USUAL.get(name, hints[one.name])
        group = dataclasses.is_dataclass(annotation)
        listed = groups if group else own
        listed.append(Field(name, annotation, sentences.get(one.name, ""), group, value))
        if dataclasses.is_dataclass(value) and not isinstance(value, Minifloat):
            listed += fields(value, type(value), f"{name}.")
        elif group:
            listed += fields(None, annotation, f"{name}.")
    return own + groups


def default_of(field: Any) -> Any:
    """Returns the default of a field; MISSING if it has none."""
    made = field.default_factory is not dataclasses.MISSING
    return field.default_factory() if made else field.default


def _sentences(kind: Any) -> dict[str, str]:
    """Returns the sentences on fields in the Attributes sections of a class and of its bases."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        section = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")[2]
        items = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, flags=re.MULTILINE)
        found |= {name: " ".join(text.split()) for name, text in items}
    return found


def nearest_field(name: str, known: Collection[str]) -> str | None:
    """Returns the path that an unknown name means, by another trainer's name or by spelling."""
    meant = {other: path for other, path in FIELD_OF.items() if path in known}
    meant |= {path.rpartition(".")[2]: path for path in known} | {path: path for path in known}
    last = name.rpartition(".")[2]
    near = [last] if last in meant else difflib.get_close_matches(name, meant, n=1)
    return meant[near[0]] if near else None


def show(value: Any) -> str:
    """Returns a value in the form that the command line takes."""
    if value is None or isinstance(value, str | int | float):
        return repr(value) if "\n" in str(value) else str(value)
    if isinstance(value, precision.Precision):
        return next((n for n, preset in precision.PRESETS.items() if preset == value), "custom")
    if is_optimizer(value):
        return function_name(value)
    if isinstance(value, tuple | Mapping):
        return " ".join(map(show, value))
    if isinstance(value, Minifloat):
        return value.name
    return type(value).__name__ if dataclasses.is_dataclass(value) else jnp.dtype(value).name
