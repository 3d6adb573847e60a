"""What FP8 does to the numbers of a run, every n-th step: records, and warnings.

    step s is due     parameters, batch -> a second program -> sums of each tensor, some gradients
                      the step itself, by the same program as without telemetry
                      new moments -> their statistics, and the error of directions

A record has a number for each tensor and statistic: {"fp8/layers/3/mlp/gate/gradient/underflow":
0.0012, ..}. Nothing is carried from one record to the next.

For a few rows of a few parameters, FP32 moments are copied from the stored ones `shadow` steps
before a record, and then get the same gradients. With shadow=1 the error is that of one step; the
FP32 moments contain the errors of all earlier steps. They are not saved: if a run resumes less than
`shadow` steps before a record, the record lacks these errors, which would cover fewer steps.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from coat_jax.optax.states.host_memory import on_device
from coat_jax.precision import precision_of
from coat_jax.storage import Storage
from coat_jax.telemetry.moments import (
    Decay,
    Shadow,
    direction_error,
    followed,
    moment_sums,
    names_of,
    read_rows,
    report_moments,
    some_rows,
    stored_leaves,
)
from coat_jax.telemetry.tensors import report, sums_and_gradients
from coat_jax.training.cluster.batches import abstract_batch
from coat_jax.training.cluster.mesh import everywhere
from coat_jax.training.compiler_options import compiler_options
from coat_jax.training.config import TrainConfig
from coat_jax.training.data import Batch
from coat_jax.training.optimizer import storage_of
from coat_jax.training.state import State
from coat_jax.training.step import Report, clip_or_skip, microbatch_loss

PREFIX = "fp8/"
ROWS = 256  # of a parameter whose direction is compared
DIGITS = 4
MOMENTS = ("mu", "nu")


class Limit(NamedTuple):
    """The least value of a statistic that causes a warning, and the words of the warning."""

    least: float
    words: str


LIMITS = {  # by statistic, or by the last words of a name where that has its own
    "direction/error": Limit(0.5, "its error is {value:.0%}"),
    "underflow": Limit(0.1, "{value:.0%} of its values became zero"),
    "subnormal": Limit(0.5, "{value:.0%} of its codes are subnormal"),
    "saturated": Limit(0.001, "{value:.1%} of its values are beyond the largest code"),
    "error": Limit(0.2, "its relative error is {value:.0%}"),
}
# The limit for operands of INT8 forward products. Values that become zero have no larger error than
# others there; above this error, FP8 would be more accurate.
IN_INT8 = ("input", "weight")
INT8_ERROR = Limit(0.03, "its relative error in INT8 is {value:.0%}, where FP8 has 3%")


class Telemetry:
    """Measures a run at the steps that have a record.

    Args:
        config: the run.
        graph: of the model, from `abstract_state`.
        state: shapes and shardings, from `abstract_state`.
        mesh: of the run.
        packed: whether a row of a batch is several texts.

    Attributes:
        empty: whether the run has nothing in 8 bits.
    """

    def __init__(
        self, config: TrainConfig, graph: Any, state: State, mesh: Mesh, *, packed: bool
    ) -> None:
        self._config = config
        self._stacked = ("layers",) if config.model.scan else ()
        # For other optimizers it is not known which direction their moments should give.
        is_adam = config.optimizer.transformation is None
        self._sampled = _sampled(state.moments, config.telemetry.leaves if is_adam else 0)
        self._storage = storage_of(config)
        self._decay = Decay(config.optimizer.b1, config.optimizer.b2, config.optimizer.eps)
        self._shadow: dict[str, Shadow] | None = None
        self._followed = 0  # steps, by the shadow
        self._seen: tuple[Any, Any] | None = None
        self._warned: set[str] = set()
        self._in_int8 = precision_of(config.model.precision).int8_forward
        everyone = everywhere(mesh)
        with jax.set_mesh(mesh):
            batch = abstract_batch(config, mesh, packed=packed)
            collect = jax.jit(
                partial(_collect, config, graph, self._sampled),
                out_shardings=(everyone, None),
                compiler_options=compiler_options(config, mesh),
            )
            lowered = collect.lower(state.params, batch)
            tensors, _ = lowered.out_info
            self.empty = not tensors and not list(stored_leaves(state.moments))
            self._collect = None if self.empty else lowered.compile()
        self._read = jax.jit(partial(_read, self._storage, self._sampled))
        self._follow = jax.jit(partial(_follow, config, self._decay))
        self._look = jax.jit(self._compared, out_shardings=everyone)

    def is_due(self, step: int) -> bool:
        """Whether there is a record of a step."""
        every = self._config.telemetry.every
        return not self.empty and every > 0 and step % every == 0

    def begin(self, step: int, state: State, batch: Batch) -> None:
        """Measures a step that is about to be taken from this state, if a record is due."""
        every, shadow = self._config.telemetry.every, self._config.telemetry.shadow
        in_bf16 = step <= self._config.steps_in_bf16  # by another program, without FP8 products
        if self._collect is None or in_bf16 or -step % every >= shadow:
            return
        self._seen = self._collect(state.params, batch)
        if self._shadow is None:
            self._shadow, self._followed = self._read(state.moments), 0

    def end(self, step: int, state: State, report_of_step: Report) -> dict[str, float] | None:
        """The numbers of the step that was taken, if it is due."""
        if self._seen is None or self._shadow is None:
            return None
        sums, grads = self._seen
        self._seen = None
        self._shadow = self._follow(self._shadow, grads, report_of_step)
        self._followed += 1
        if not self.is_due(step):
            return None
        looked = self._look(state, self._shadow)
        self._shadow = None
        sums, (of_moments, errors) = jax.device_get((sums, looked))
        found: dict[str, float] = {}
        for name, of_tensor in (report(sums) | report_moments(of_moments)).items():
            for statistic, value in of_tensor._asdict().items():
                found[f"{PREFIX}{name}/{statistic}"] = _rounded(value)
        if self._followed == self._config.telemetry.shadow:  # the shadow began early enough
            for name, error in errors.items():
                found[f"{PREFIX}{self._labelled(name)}/direction/error"] = _rounded(float(error))
        return found

    def warning(self, found: Mapping[str, float]) -> str | None:
        """One line about the worst new problem, and how many others there are; None without any."""
        limits = {key: self._limit(key) for key in found}
        off = {key: words for key in found if (words := _objection(limits[key], found[key]))}
        new = [key for key in off if key not in self._warned]
        self._warned.update(new)
        if not new:
            return None
        worst = max(new, key=lambda key: _excess(limits[key], found[key]))
        others = f"; {len(off) - 1:,} more are off" if len(off) > 1 else ""
        name = worst.removeprefix(PREFIX).rpartition("/")[0]
        return f"{name}: {off[worst]}{others}."

    def _limit(self, key: str) -> Limit | None:
        """The limit of a number, if it has one."""
        words = key.split("/")
        if self._in_int8 and words[-2] in IN_INT8:
            return INT8_ERROR if words[-1] == "error" else None
        return LIMITS.get("/".join(words[-2:])) or LIMITS.get(words[-1])

    def _labelled(self, name: str) -> str:
        """A parameter's name; for stacked layers, with the number of the layer that is sampled."""
        first, _, rest = name.partition("/")
        middle = self._config.model.layers // 2  # see `some_rows`
        return f"{first}/{middle}/{rest}" if first in self._stacked else name

    def _compared(self, state: State, shadow: dict[str, Shadow]) -> Any:
        """Sums of all moments, and the error of each direction that is followed."""
        count = state.step - state.skipped
        stored = _read(self._storage, self._sampled, state.moments)
        errors = {
            name: direction_error(stored[name], exact, count, self._decay)
            for name, exact in shadow.items()
        }
        return moment_sums(on_device(state.moments), self._stacked), errors


# --- What is compiled ------------------------------------------------------------------------


def _collect(
    config: TrainConfig, graph: Any, sampled: Sequence[str], params: Any, batch: Batch
) -> tuple[dict[str, Array], dict[str, Array]]:
    """The sums of each tensor, and rows of some gradients, of a batch in its microbatches."""
    labels = jnp.sum(batch.labels >= 0)
    loss = partial(microbatch_loss, config, graph, labels)

    def one(part: Batch) -> tuple[dict[str, Array], dict[str, Array]]:
        sums, grads = sums_and_gradients(loss, params, part)
        leaves, _ = jax.tree_util.tree_flatten_with_path(grads)
        named = {"/".join(names_of(path)): leaf for path, leaf in leaves}
        return sums, {name: _rows(named[name]) for name in sampled}

    first = jax.tree.map(lambda array: array[0], batch)
    if batch.tokens.shape[0] == 1:
        return one(first)
    shapes = jax.eval_shape(one, first)
    zeros = jax.tree.map(lambda like: jnp.zeros(like.shape, jnp.float32), shapes)
    added: tuple[dict[str, Array], dict[str, Array]] = lax.scan(
        lambda total, part: (jax.tree.map(jnp.add, total, one(part)), None), zeros, batch
    )[0]
    return added


def _read(storage: Storage, sampled: Sequence[str], moments: Any) -> dict[str, Shadow]:
    stored = _by_name(moments)
    return {name: read_rows(storage, on_device(stored[name]), ROWS) for name in sampled}


def _follow(
    config: TrainConfig, decay: Decay, shadow: dict[str, Shadow], grads: Any, step: Report
) -> dict[str, Shadow]:
    """The FP32 moments after a step, whose gradients were clipped, or which was skipped."""
    scale, skip = clip_or_skip(config, step.gradient_norm, step.loss)
    after = {name: followed(of, scale * grads[name], decay) for name, of in shadow.items()}
    return jax.tree.map(lambda new, old: jnp.where(skip, old, new), after, shadow)


def _rows(x: Array) -> Float[Array, "*rows D"]:
    return some_rows(x, ROWS).astype(jnp.float32)


# --- Which parameters ------------------------------------------------------------------------


def _sampled(moments: Any, count: int) -> tuple[str, ...]:
    """Some parameters whose moments are in 8 bits, from the first to the last."""
    names = [name for name, pair in _by_name(moments).items() if len(pair) == len(MOMENTS)]
    if len(names) <= count:
        return tuple(names)
    return tuple(names[i * len(names) // count] for i in range(count))


def _by_name(moments: Any) -> dict[str, list[Any]]:
    """Both stored moments of each parameter that has them in 8 bits."""
    found: dict[str, list[Any]] = {}
    for path, moment, stored in stored_leaves(moments):
        if moment in MOMENTS:
            found.setdefault("/".join(path), []).append(stored)
    return found


# --- Numbers ---------------------------------------------------------------------------------


def _objection(limit: Limit | None, value: float) -> str | None:
    """The warning about a number, if it exceeds its limit or is not finite."""
    if limit is None:
        return None
    if not math.isfinite(value):
        return "it is not finite"
    return limit.words.format(value=value) if value >= limit.least else None


def _excess(limit: Limit | None, value: float) -> float:
    """How far a number is beyond its limit, as a factor."""
    return math.inf if limit is None or not math.isfinite(value) else value / limit.least


def _rounded(value: float) -> float:
    """A record has thousands of numbers: few digits each."""
    return float(f"{value:.{DIGITS}g}")
