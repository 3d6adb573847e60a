"""Which fields of a config may change when a run resumes.

A run may resume with more steps, on another mesh, in another precision, but not with other
parameters or other rows of data. What it began from cannot change once there is a checkpoint.
"""

from collections.abc import Mapping
from typing import Any

from flax.traverse_util import flatten_dict

from coat_jax.errors import UserError
from coat_jax.training.config import TrainConfig
from coat_jax.training.config.run import to_json

# Fields whose names begin with one of FIXED must stay the same, except those in FREE: they decide
# the parameters, moments and rows. Token files do not need their tokenizer again.
FIXED: tuple[str, ...] = ("model.", "data.", "optimizer.name", "optimizer.moments")
FIXED += ("optimizer.round_params", "optimizer.release_gradients", "frozen")
FIXED += ("global_batch_size", "sequence_length", "seed")
FREE: tuple[str, ...] = (
    "model.precision",
    "model.remat",
    "model.dtype",
    "model.z_loss",
    "model.activation_limit",
    "data.tokenizer",
)
FREE += ("model.experts.aux_loss", "model.experts.z_loss")
NOT_COMPARED = ("out", "resume", "cache", "metrics")


def changes(config: TrainConfig, saved: Mapping[str, Any], *, step: int | None) -> list[str]:
    """Returns what differs from the config that was saved, as JSON, one line each.

    `step` is that of the newest checkpoint, None without any. Raises UserError if the run cannot
    continue with a change.
    """
    before, now = flatten_dict(saved, sep="."), flatten_dict(to_json(config), sep=".")
    names = sorted(n for n in before.keys() | now.keys() if n.split(".")[0] not in NOT_COMPARED)
    lines = {
        name: f"{name} was {before.get(name)!r}, now {now.get(name)!r}"
        for name in names
        if before.get(name) != now.get(name)
    }
    fixed = [name for name in lines if name.startswith(FIXED) and not name.startswith(FREE)]
    fixed += ["init_from"] if step is not None and "init_from" in lines else []
    if fixed:
        raise UserError(
            f"{config.out} holds another run: {'; '.join(lines[name] for name in fixed[:4])}. "
            "Continue as it began, choose another folder with --out (and --init_from to begin from "
            "these parameters), or begin anew with --resume false, which moves that run out of the "
            "way."
        )
    if step is not None and step > config.total_steps:
        raise UserError(
            f"{config.out} holds a run that has taken {step:,} steps, and total_steps="
            f"{config.total_steps:,}. Raise it, choose another folder with --out, or begin anew "
            "with --resume false, which moves that run out of the way."
        )
    return list(lines.values())
