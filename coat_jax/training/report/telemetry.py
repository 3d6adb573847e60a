"""Statistics of a run's tensors in FP8 and of its 8-bit moments, every n-th step; and warnings.

Before a step that is due, a second program computes the gradients of the step's batch, and a few
sums for each tensor. The step itself is taken by the same program as without telemetry. A record
has a number for each tensor and statistic:

    {"fp8/layers/3/mlp/gate/gradient/underflow": 0.0012, ...}
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array

from coat_jax.optax.states.host_memory import on_device
from coat_jax.precision import precision_of
from coat_jax.telemetry.moments import moment_sums, report_moments
from coat_jax.telemetry.tensors import report, sums_and_gradients
from coat_jax.training.cluster.mesh import abstract_batch, everywhere
from coat_jax.training.compilation import compiler_options
from coat_jax.training.config import TrainConfig
from coat_jax.training.step import State, loss_of, split_trained

PREFIX = "fp8/"
# The least value of a statistic that causes a warning, and the words of the warning.
LIMITS = {
    "underflow": (0.1, "{:.0%} of its values became zero"),
    "subnormal": (0.5, "{:.0%} of its codes are subnormal"),
    "saturated": (0.001, "{:.1%} of its values are beyond the largest code"),
    "error": (0.2, "its relative error is {:.0%}"),
}
# In INT8 forward products, values that become zero have no larger error than others; above this
# error, FP8 would be more accurate.
INT8_OPERANDS = ("input", "weight")
INT8_LIMITS = {"error": (0.03, "its relative error in INT8 is {:.0%}, where FP8 has 3%")}


class Telemetry:
    """Measures a run before the steps that have a record.

    Attributes:
        empty: whether the run has nothing in 8 bits; then nothing is compiled.
    """

    def __init__(
        self, config: TrainConfig, graph: Any, state: State, mesh: Mesh, example: Any = None
    ) -> None:
        self._config, self._graph = config, graph
        self._int8 = precision_of(config.model.precision).forward_products == "int8"
        self._warned: set[str] = set()
        stacked = (config.model.STACK,) if config.model.scan else ()
        jit = partial(
            jax.jit,
            out_shardings=everywhere(mesh),
            compiler_options=compiler_options(config, mesh),
        )
        with jax.set_mesh(mesh):
            batch = abstract_batch(config, mesh, example)
            tensors = jit(self._sums).lower(state.params, batch)
            moments = jit(lambda m: moment_sums(on_device(m), stacked)).lower(state.moments)
            self.empty = not tensors.out_info and not moments.out_info
            if not self.empty:
                self._tensors, self._moments = tensors.compile(), moments.compile()

    def measure(self, step: int, state: State, batch: Any) -> dict[str, float] | None:
        """Returns the numbers of the step that this state and batch begin; None if it has none."""
        in_bf16 = step <= self._config.steps_in_bf16  # by another program, without FP8 products
        if in_bf16 or step % self._config.telemetry.every:
            return None
        sums = self._tensors(state.params, batch), self._moments(state.moments)
        tensors, moments = jax.device_get(sums)
        # A record has thousands of numbers: few digits each.
        return {
            f"{PREFIX}{name}/{statistic}": float(f"{value:.4g}")
            for name, statistics in (report(tensors) | report_moments(moments)).items()
            for statistic, value in statistics._asdict().items()
        }

    def warning(self, found: Mapping[str, float]) -> str | None:
        """Returns a line about the worst new problem and the number of others; None without any."""
        off = {}  # how many times its limit a number is, and the words of the warning
        for key, value in found.items():
            *_, tensor, statistic = key.split("/")
            limits = INT8_LIMITS if self._int8 and tensor in INT8_OPERANDS else LIMITS
            least, words = limits.get(statistic, (None, ""))
            if least is not None and not math.isfinite(value):
                off[key] = math.inf, "it is not finite"
            elif least is not None and value >= least:
                off[key] = value / least, words.format(value)
        new = [key for key in off if key not in self._warned]
        self._warned.update(new)
        if not new:
            return None
        worst = max(new, key=lambda key: off[key][0])
        others = f"; {len(off) - 1:,} more are off" if len(off) > 1 else ""
        return f"{worst.removeprefix(PREFIX).rpartition('/')[0]}: {off[worst][1]}{others}."

    def _sums(self, params: Any, batch: Any) -> dict[str, Array]:
        """Returns the sums of each tensor, added up over the microbatches of a batch."""
        trained, rest = split_trained(self._config, params)
        only_one = self._config.gradient_accumulation_steps == 1

        def loss(trained: Any, microbatch: Any) -> Array:  # as in `summed_gradients`
            found = loss_of(self._graph, rest, trained, microbatch)
            return found.mean if only_one else found.sum

        sums = lax.map(lambda part: sums_and_gradients(loss, trained, part)[0], batch)
        return jax.tree.map(lambda x: x.sum(axis=0), sums)
