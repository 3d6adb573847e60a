"""The smaller parts of a run: devices, evaluations, checkpoints, telemetry.

Their values are checked when they become part of a TrainConfig.
"""

import dataclasses
from typing import Literal

from coat_jax.validation import Count, CountOrZero

Devices = Count | Literal[-1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How devices share the work. One of the four may be -1: it takes all devices left over.

    Attributes:
        data: how many devices share the batch, each with all parameters.
        fsdp: how many devices share the batch and the parameters, which are gathered when they are
            needed.
        expert: how many devices share the batch and the hidden width of each expert.
        tensor: how many devices share the hidden widths of layers.
    """

    data: Devices = 1
    fsdp: Devices = -1
    expert: Devices = 1
    tensor: Devices = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """When the loss on held-out data is measured.

    Attributes:
        every: steps between evaluations; the last step is always followed by one. 0 for none.
        batches: how many held-out batches of global_batch_size rows are used, always the same
            ones; all if there are fewer.
    """

    every: CountOrZero = 200
    batches: Count = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the run is saved, and which checkpoints stay on disk.

    Attributes:
        every: steps between checkpoints; the last step is always saved. 0 for none.
        keep: how many of the newest checkpoints are kept.
        keep_best: how many of those with the lowest held-out loss are kept as well.
    """

    every: CountOrZero = 1000
    keep: Count = 2
    keep_best: CountOrZero = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """How often statistics of FP8 tensors and of 8-bit moments are recorded.

    Attributes:
        every: steps between records; 0 for none, at no cost. A record takes a second forward
            and backward pass, and some passes over each tensor.
    """

    every: CountOrZero = 0
