"""The state of a run besides that of its training step: a checkpoint stores it, too."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from coat_jax.training import resume_rules
from coat_jax.training.config import TrainConfig


class ResumeState(NamedTuple):
    """Where a run continues, by default at its beginning."""

    step: int = 0  # the last one taken
    data: Mapping[str, Any] = MappingProxyType({})  # the state of the loader
    seconds: float = 0.0  # how long the run has taken, in all its processes


def to_json(resume: ResumeState, config: TrainConfig) -> dict[str, Any]:
    """The state and the config of the run, for `Checkpoints.save`."""
    return {**resume._asdict(), "config": resume_rules.to_json(config)}


def from_json(step: int, extra: Mapping[str, Any]) -> ResumeState:
    """Reads what `to_json` wrote."""
    known = {name: extra[name] for name in ResumeState._fields if name in extra}
    return ResumeState(**known | {"step": step})
