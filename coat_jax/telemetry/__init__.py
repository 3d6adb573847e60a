"""Statistics of the numbers that training rounds to 8 bits.

    measure     statistics of each operand, saved tensor and gradient that a loss function rounds
    moments     statistics of each moment that an optimizer stores in 8 bits
    named       names a part of a model, for `measure`

`sums_and_gradients` and `report` are the halves of `measure`: the first is part of a compiled
program, and the second turns its result into statistics.
"""

from coat_jax.numerics.statistics import Statistics
from coat_jax.probes import named
from coat_jax.telemetry.moments import MomentStatistics, moments
from coat_jax.telemetry.tensors import measure, report, sums_and_gradients

__all__ = [
    "MomentStatistics",
    "Statistics",
    "measure",
    "moments",
    "named",
    "report",
    "sums_and_gradients",
]
