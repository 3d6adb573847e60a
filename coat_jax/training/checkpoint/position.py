"""The position of a run: what a checkpoint stores besides the state, for the process that resumes.

{"step": 20, "data": {"data": .., "seed": 0, "rows": 640}, "seconds": 51.2, "recorded": 20,
 "unwritten": [], "config": ..}
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from coat_jax.errors import UserError
from coat_jax.training import resume_rules
from coat_jax.training.config import TrainConfig


class Position(NamedTuple):
    """The position of a run, by default its beginning.

    Attributes:
        step: the last one taken.
        data: the state of the loader.
        seconds: how long the run has taken, all its processes one after the other.
        recorded: the step of the last record in metrics.jsonl.
        unwritten: records that did not get into metrics.jsonl.
    """

    step: int = 0
    data: Mapping[str, Any] = MappingProxyType({})
    seconds: float = 0.0
    recorded: int = 0
    unwritten: Sequence[Mapping[str, Any]] = ()


def to_json(position: Position, config: TrainConfig) -> dict[str, Any]:
    """A position, and the config of the run, for `Checkpoints.save`."""
    saved = position._asdict() | {"data": dict(position.data)}
    return saved | {"config": resume_rules.to_json(config)}


def position_of(step: int, extra: Mapping[str, Any]) -> Position:
    """Reads what `to_json` wrote.

    Raises:
        UserError: if another program saved the checkpoint.
    """
    data = extra.get("data")
    if "seconds" not in extra or not isinstance(data, dict) or "rows" not in data:
        raise UserError(
            f"The checkpoint of step {step} does not say where a run stands: `coat train` did not "
            "save it. Begin from its parameters with --init_from, in another folder."
        )
    recorded, unwritten = extra.get("recorded", 0), extra.get("unwritten", [])
    return Position(step, data, extra["seconds"], recorded, unwritten)
