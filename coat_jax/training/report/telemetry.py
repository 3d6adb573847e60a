"""Statistics of a run's tensors in FP8, every n-th step: records, and warnings.

    step s is due     parameters, batch -> a second program -> sums of each tensor, some gradients
                      the step itself, by the same program as without telemetry
                      new moments -> their statistics, and the error of directions

A record has a number for each tensor and statistic: {"fp8/layers/3/mlp/gate/gradient/underflow":
0.0012, ..}. Nothing is carried from one record to the next.

For a few rows of a few parameters, FP32 moments (the shadow) are copied from the stored ones
`shadow` steps before a record, and then get the same gradients. They are not saved: if a run
resumes less than `shadow` steps before a record, the record lacks the errors of directions.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array

from coat_jax.optax.states.host_memory import on_device
from coat_jax.precision import precision_of
from coat_jax.telemetry.moments import (
    Decay,
    Shadow,
    direction_error,
    moment_sums,
    names_of,
    next_shadow,
    read_rows,
    report_moments,
    some_rows,
    stored_leaves,
)
from coat_jax.telemetry.tensors import report, sums_and_gradients
from coat_jax.training.cluster.mesh import abstract_batch, everywhere
from coat_jax.training.compiler_options import compiler_options
from coat_jax.training.config import TrainConfig
from coat_jax.training.optimizer import storage_of
from coat_jax.training.step import (
    Report,
    State,
    clip_or_skip,
    first_microbatch,
    loss_of,
    split_trained,
)

PREFIX = "fp8/"
ROWS = 256  # of a parameter whose direction is compared
MOMENTS = ("mu", "nu")
# The least value of a statistic that causes a warning, and the words of the warning.
LIMITS = {
    "direction/error": (0.5, "its error is {:.0%}"),
    "underflow": (0.1, "{:.0%} of its values became zero"),
    "subnormal": (0.5, "{:.0%} of its codes are subnormal"),
    "saturated": (0.001, "{:.1%} of its values are beyond the largest code"),
    "error": (0.2, "its relative error is {:.0%}"),
}
# In INT8 forward products, values that become zero have no larger error than others; above this
# error, FP8 would be more accurate.
INT8_OPERANDS = ("input", "weight")
INT8_LIMIT = (0.03, "its relative error in INT8 is {:.0%}, where FP8 has 3%")


class Telemetry:
    """Measures a run at the steps that have a record.

    Attributes:
        empty: whether the run has nothing in 8 bits.
    """

    def __init__(
        self, config: TrainConfig, graph: Any, state: State, mesh: Mesh, example: Any = None
    ) -> None:
        self._config, self._graph, self._storage = config, graph, storage_of(config)
        optimizer = config.optimizer
        self._decay = Decay(optimizer.b1, optimizer.b2, optimizer.eps)
        self._stacked = (config.model.STACK,) if config.model.scan else ()
        # For other optimizers it is not known which direction their moments should give.
        known = optimizer.transformation is None
        names = [n for n, pair in _by_name(state.moments).items() if known and len(pair) == 2]
        count = min(config.telemetry.leaves, len(names))
        self._sampled = [names[i * len(names) // count] for i in range(count)]
        self._shadow: dict[str, Shadow] | None = None
        self._followed = 0  # steps, by the shadow
        self._seen: Any = None  # sums and gradients of the step that is being taken
        self._warned: set[str] = set()
        replicated, options = everywhere(mesh), compiler_options(config, mesh)
        collect = jax.jit(self._sums, out_shardings=(replicated, None), compiler_options=options)
        with jax.set_mesh(mesh):
            lowered = collect.lower(state.params, abstract_batch(config, mesh, example))
            self.empty = not lowered.out_info[0] and not list(stored_leaves(state.moments))
            self._collect = None if self.empty else lowered.compile()
        self._read = jax.jit(self._rows)
        self._follow = jax.jit(self._next_shadow, out_shardings=(None, replicated))

    def begin(self, step: int, state: State, batch: Any) -> None:
        """Measures a step that is about to be taken from this state, if a record is due."""
        every, shadow = self._config.telemetry.every, self._config.telemetry.shadow
        in_bf16 = step <= self._config.steps_in_bf16  # by another program, without FP8 products
        if self._collect is None or in_bf16 or -step % every >= shadow:
            return
        self._seen = self._collect(state.params, batch)
        if self._shadow is None:
            self._shadow, self._followed = self._read(state.moments), 0

    def end(self, step: int, state: State, report_of_step: Report) -> dict[str, float] | None:
        """The numbers of the step that was taken, if a record is due."""
        if self._seen is None:
            return None
        (sums, grads), self._seen = self._seen, None
        self._shadow, compared = self._follow(self._shadow, grads, report_of_step, state)
        self._followed += 1
        if step % self._config.telemetry.every:
            return None
        self._shadow = None
        sums, (of_moments, errors) = jax.device_get((sums, compared))
        found = {
            f"{name}/{statistic}": value
            for name, statistics in (report(sums) | report_moments(of_moments)).items()
            for statistic, value in statistics._asdict().items()
        }
        if self._followed == self._config.telemetry.shadow:  # the shadow began early enough
            found |= {f"{self._label(name)}/direction/error": errors[name] for name in errors}
        # A record has thousands of numbers: few digits each.
        return {f"{PREFIX}{name}": float(f"{value:.4g}") for name, value in found.items()}

    def warning(self, found: Mapping[str, float]) -> str | None:
        """One line about the worst new problem, and how many others there are; None without any."""
        off = {}  # how many times its limit a number is, and the words of the warning
        for key, value in found.items():
            limit = self._limit(key)
            if limit is not None and not math.isfinite(value):
                off[key] = math.inf, "it is not finite"
            elif limit is not None and value >= limit[0]:
                off[key] = value / limit[0], limit[1].format(value)
        new = [key for key in off if key not in self._warned]
        self._warned.update(new)
        if not new:
            return None
        worst = max(new, key=lambda key: off[key][0])
        others = f"; {len(off) - 1:,} more are off" if len(off) > 1 else ""
        return f"{worst.removeprefix(PREFIX).rpartition('/')[0]}: {off[worst][1]}{others}."

    def _limit(self, key: str) -> tuple[float, str] | None:
        *_, tensor, statistic = key.split("/")
        int8 = precision_of(self._config.model.precision).int8_forward
        if int8 and tensor in INT8_OPERANDS:
            return INT8_LIMIT if statistic == "error" else None
        return LIMITS.get(f"{tensor}/{statistic}") or LIMITS.get(statistic)

    def _label(self, name: str) -> str:
        """A parameter's name; for stacked layers, with the number of the layer that is sampled."""
        first, _, rest = name.partition("/")
        model: Any = self._config.model
        # See `some_rows`.
        return f"{first}/{model.layers // 2}/{rest}" if first in self._stacked else name

    # --- What is compiled --------------------------------------------------------------------

    def _sums(self, params: Any, batch: Any) -> tuple[dict[str, Array], dict[str, Array]]:
        """The sums of each tensor, and rows of some gradients, of a batch.

        With several microbatches the gradients are those of the sum over labels, not of the mean.
        """
        trained, rest = split_trained(self._config, params)
        microbatches = self._config.gradient_accumulation_steps

        def loss(trained: Any, microbatch: Any) -> Array:  # as in `summed_gradients`
            found = loss_of(self._graph, rest, trained, microbatch)
            return found.mean if microbatches == 1 else found.sum

        def one(microbatch: Any) -> tuple[dict[str, Array], dict[str, Array]]:
            sums, grads = sums_and_gradients(loss, trained, microbatch)
            leaves, _ = jax.tree_util.tree_flatten_with_path(grads)
            named = {"/".join(names_of(path)): leaf for path, leaf in leaves}
            rows = {name: some_rows(named[name], ROWS) for name in self._sampled}
            return sums, jax.tree.map(lambda x: x.astype(jnp.float32), rows)

        if microbatches == 1:
            return one(first_microbatch(batch))
        shapes = jax.eval_shape(one, first_microbatch(batch))
        zeros = jax.tree.map(lambda like: jnp.zeros(like.shape, jnp.float32), shapes)
        added: tuple[dict[str, Array], dict[str, Array]] = lax.scan(
            lambda total, part: (jax.tree.map(jnp.add, total, one(part)), None), zeros, batch
        )[0]
        return added

    def _rows(self, moments: Any) -> dict[str, Shadow]:
        stored = _by_name(moments)
        return {n: read_rows(self._storage, on_device(stored[n]), ROWS) for n in self._sampled}

    def _next_shadow(
        self, shadow: dict[str, Shadow], grads: Any, step: Report, state: State
    ) -> tuple[dict[str, Shadow], Any]:
        """The shadow after a step; the sums of all moments, and the errors of directions."""
        scale, skip = clip_or_skip(self._config, step.gradient_norm, step.loss)
        if self._config.gradient_accumulation_steps > 1:
            scale = scale / jnp.maximum(step.labels, 1)
        after = {n: next_shadow(of, scale * grads[n], self._decay) for n, of in shadow.items()}
        after = jax.tree.map(lambda new, old: jnp.where(skip, old, new), after, shadow)
        stored, count = self._rows(state.moments), state.step - state.skipped
        errors = {n: direction_error(stored[n], after[n], count, self._decay) for n in after}
        return after, (moment_sums(on_device(state.moments), self._stacked), errors)


def _by_name(moments: Any) -> dict[str, list[Any]]:
    """Both stored moments of each parameter that has them in 8 bits."""
    found: dict[str, list[Any]] = {}
    for path, moment, stored in stored_leaves(moments):
        if moment in MOMENTS:
            found.setdefault("/".join(path), []).append(stored)
    return found
