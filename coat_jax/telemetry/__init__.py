"""What FP8 does to the numbers of a model while it trains.

    measure     of a loss function: each operand, saved tensor and gradient that its layers round
    moments     of an optimizer's state: each moment that is stored in FP8
    named       names a part of a model, for `measure`

`sums_and_gradients` and `report` are the halves of `measure`: what is compiled, and what reads it.
"""

from coat_jax.numerics.statistics import Statistics
from coat_jax.telemetry.moments import MomentStatistics, moments
from coat_jax.telemetry.tensors import measure, report, sums_and_gradients
from coat_jax.watching import named

__all__ = [
    "MomentStatistics",
    "Statistics",
    "measure",
    "moments",
    "named",
    "report",
    "sums_and_gradients",
]
