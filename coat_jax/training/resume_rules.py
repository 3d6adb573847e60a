"""A config as JSON, and which of its fields may change when a run resumes.

A run may resume with more steps, on another mesh, in another precision, but not with other
parameters or other rows of data. What it began from cannot change once there is a checkpoint.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from coat_jax.errors import UserError
from coat_jax.limits import added_since
from coat_jax.numerics.minifloat import Minifloat
from coat_jax.training.config import TrainConfig
from coat_jax.training.config.optimizer import function_name, is_optimizer

# Fields whose names begin with one of FIXED must stay the same, except those in FREE. Another
# tokenizer means other data, unless the data is token files: then training does not read the
# tokenizer.
FIXED = ("model.", "data.", "optimizer.name", "global_batch_size", "sequence_length", "seed")
FREE = ("model.precision", "model.remat", "model.dtype", "data.tokenizer")
NOT_COMPARED = ("out", "resume", "cache", "metrics")
# Names that fields had in the configs of earlier versions. Values that were shares of the run are
# still read as shares, because they are not integers.
RENAMED = {
    "steps": "total_steps",
    "batch": "global_batch_size",
    "sequence": "sequence_length",
    "accumulation": "gradient_accumulation_steps",
    "optimizer.peak": "optimizer.learning_rate",
    "optimizer.warmup": "optimizer.warmup_steps",
    "optimizer.cooldown": "optimizer.decay_steps",
    "optimizer.final": "optimizer.final_ratio",
    "optimizer.clip": "optimizer.clip_norm",
}
NAME, TRANSFORMATION = "optimizer.name", "optimizer.transformation"
MOMENTS = "optimizer.moments"
IN_FP8 = ("expanded", "paper")  # moments that are stored alike
# What these settings put into checkpoints. Earlier versions had neither.
IN_CHECKPOINTS = {
    "optimizer.correct_params": "corrections of its parameters",
    "optimizer.release_gradients": "the norm of its last gradients",
}


def to_json(value: Any) -> Any:
    """A config, or a part of one, in JSON's types."""
    if dataclasses.is_dataclass(value) and not isinstance(value, Minifloat):
        fields = dataclasses.fields(value)
        return {field.name: to_json(getattr(value, field.name)) for field in fields}
    if isinstance(value, Mapping):  # functions by name
        return {name: function_name(item) for name, item in value.items()}
    if is_optimizer(value):
        return function_name(value)
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    if value is None or isinstance(value, str | int | float):
        return value
    return value.name if isinstance(value, Minifloat) else jnp.dtype(value).name


def changes(config: TrainConfig, saved: Mapping[str, Any], *, begun: bool = True) -> list[str]:
    """What differs from the config that was saved, one line each.

    Args:
        config: of the run that resumes.
        saved: the config of the run so far, as JSON.
        begun: whether there is a checkpoint.

    Raises:
        UserError: if the run cannot continue with a change, naming it.
    """
    before = {RENAMED.get(name, name): value for name, value in _flat(saved)}
    now = dict(_flat(to_json(config)))
    if MOMENTS not in before:  # an earlier version, which stored them in FP8 alone
        before[MOMENTS] = IN_FP8[0] if before.get(NAME) == "fp8_adamw" else now[MOMENTS]
    before = dict.fromkeys(IN_CHECKPOINTS, False) | dict(_added_since(config)) | before
    names = sorted(n for n in before.keys() | now.keys() if n.split(".")[0] not in NOT_COMPARED)
    differ = [name for name in names if before.get(name) != now.get(name)]
    described = {name: f"{name} was {before.get(name)!r}, now {now.get(name)!r}" for name in differ}
    fatal = [
        described[name] for name in differ if _is_fixed(name) or (begun and name == "init_from")
    ]
    if (before.get(TRANSFORMATION) is None) != (now[TRANSFORMATION] is None):
        fatal.insert(0, described[TRANSFORMATION])
    if fatal:
        raise UserError(
            f"{config.out} holds another run: {'; '.join(fatal[:4])}. Choose another folder with "
            "--out, or begin anew with --resume false, which moves that run out of the way."
        )
    if MOMENTS in differ and _are_stored_otherwise(before, now):
        raise UserError(
            f"{config.out} holds a run whose moments are stored otherwise: {described[MOMENTS]}. "
            f"Continue as it began, with --{MOMENTS} {before[MOMENTS]}; or begin from its "
            "parameters in another folder, with --init_from and --out."
        )
    for name, held in IN_CHECKPOINTS.items():
        if name in differ:
            have = "have" if before[name] else "do not have"
            raise UserError(
                f"{config.out} holds a run whose checkpoints {have} {held}: {described[name]}. "
                f"Continue as it began, with --{name} {str(before[name]).lower()}; or begin from "
                "its parameters in another folder, with --init_from and --out."
            )
    return list(described.values())


def _are_stored_otherwise(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether the moments of `fp8_adamw` are in other formats than those that were saved."""
    alike = before[MOMENTS] in IN_FP8 and now[MOMENTS] in IN_FP8
    in_8_bits = now[NAME] == "fp8_adamw" and now[TRANSFORMATION] is None
    return in_8_bits and not alike


def _is_fixed(name: str) -> bool:
    return name.startswith(FIXED) and not name.startswith(FREE)


def _added_since(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The fields that configs of earlier versions lacked, with what these versions did."""
    for name, before in added_since(config).items():
        yield prefix + name, before
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _added_since(value, f"{prefix}{field.name}.")


def _flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its dotted name."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from _flat(value, f"{prefix}.{name}" if prefix else name)
    else:
        yield prefix, tree
