"""One step of training, and one of evaluation: the functions that are compiled.

    loss, gradients = (sum of the losses of all labels, its gradient) / number of labels
    parameters      = the optimizer's, with gradients scaled down to the norm `clip_norm`

Arrays of a batch are [accumulation, rows, ...]. Over microbatches the sums are in FP32. A step
whose gradients or loss are not finite changes nothing and is counted; one that releases its
gradients skips only the stages whose gradients are not finite. Parameters and moments are updated
in place; a conditional would copy them.
"""

import math
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, Num

from coat_jax.errors import UserError
from coat_jax.models import Loss
from coat_jax.models.lazy_arrays import dotted_name
from coat_jax.models.llama import shard_params
from coat_jax.optax import InPlaceOptimizer, global_norm, step_by_stages
from coat_jax.optax.clipping import clip_scale
from coat_jax.training.config import TrainConfig
from coat_jax.training.optimizer import learning_rate
from coat_jax.validation import brief


class State(NamedTuple):
    """The state of a run between two steps: one tree of arrays, donated, saved and restored whole.

    It has no random number generator: the order of the data and all rounding follow from hashes of
    the config's seed and the step's number.

    Attributes:
        step: how many steps were taken, skipped ones included.
        params: the state of the NNX model.
        moments: the optimizer's state, of the parameters that are trained; each leaf is sharded as
            its parameter is.
        skipped: how many of the steps had gradients or a loss that were not finite.
        gradient_norm: of the step before, if gradients are released; NaN before the first one.
    """

    step: Int32[Array, ""]
    params: Any
    moments: Any
    skipped: Int32[Array, ""]
    gradient_norm: Any = ()


def split_trained(config: TrainConfig, params: Any) -> tuple[Any, Any]:
    """Returns the parameters that have gradients and moments, and the rest of a model's state."""
    trained, rest = nnx.split_state(
        params,
        lambda path, variable: (
            issubclass(getattr(variable, "type", type(variable)), nnx.Param)
            and not any(fnmatchcase(dotted_name(path), glob) for glob in config.frozen)
        ),
        ...,
    )
    return trained, rest


class FinishedStep(NamedTuple):
    """A finished step, the argument of the functions in `TrainConfig.metrics`.

    Attributes:
        params: after the update.
        grads: before clipping.
        moments: the state of the optimizer, after the update. With `optimizer.offload` its large
            arrays are in host memory, and `jax.device_put(array, jax.memory.Space.Device)` reads
            them.
        loss: before the update.
        gradient_norm: before clipping.
        learning_rate: of this step.
        statistics: the sums that the model's loss returned.
    """

    params: Any
    grads: Any
    moments: Any
    loss: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    learning_rate: Float[Array, ""]
    statistics: Mapping[str, Array] = {}


class Report(NamedTuple):
    """The numbers of a step; the loss is from before the update."""

    loss: Float[Array, ""]
    gradient_norm: Float[Array, ""]  # before clipping
    learning_rate: Float[Array, ""]
    labels: Num[Array, ""]  # that the loss is the mean of
    skipped: Int32[Array, ""]  # steps so far
    metrics: Mapping[str, Array] = {}  # of the model, and added by the config


def train_step(
    config: TrainConfig, graph: Any, optimizer: InPlaceOptimizer, state: State, batch: Any
) -> tuple[State, Report]:
    """Returns the next state, and how the step went; `state` is donated."""
    trained, rest = split_trained(config, state.params)
    found, grads, divisor = summed_gradients(partial(loss_of, graph, rest), trained, batch)
    loss, norm = found.mean, global_norm(grads) / divisor
    scale, skip = clip_or_skip(config, norm, loss)
    trained, moments = optimizer.step(
        trained, grads, state.moments, grad_scale=scale / divisor, skip=skip
    )
    rest, numbers = _after_step(graph, trained, rest, found.statistics, skip)
    params = nnx.merge_state(trained, rest)
    # For the log: the optimizer has a count of its own, and evaluates the schedule itself.
    rate = learning_rate(config.optimizer, config.total_steps, state.step - state.skipped)
    skipped = state.skipped + skip
    mean_grads = jax.tree.map(lambda g: g / divisor, grads)  # computed only if a metric uses it
    step = FinishedStep(params, mean_grads, moments, loss, norm, rate, found.statistics)
    means = {name: Loss(total, found.count).mean for name, total in found.scalars.items()}
    own = {name: _number(name, metric(step)) for name, metric in config.metrics.items()}
    report = Report(loss, norm, rate, found.count, skipped, means | numbers | own)
    return State(state.step + 1, params, moments, skipped), report


def releasing_step(
    config: TrainConfig, graph: Any, optimizer: InPlaceOptimizer, state: State, batch: Any
) -> tuple[State, Report]:
    """As `train_step`, but the backward pass updates parameters and frees gradients.

    See `coat_jax.optax.step_by_stages`. Gradients are clipped by the norm of the step before.
    """
    stages, labels = nnx.merge(graph, state.params).stages(first_microbatch(batch))
    scale = partial(
        scale_of_stage, config.optimizer.clip_norm, state.gradient_norm, math.sqrt(len(stages))
    )
    done = step_by_stages(optimizer, stages, state.params, state.moments, grad_scale=scale)
    # For the log, as in `train_step`.
    rate = learning_rate(config.optimizer, config.total_steps, state.step - state.skipped)
    skipped = state.skipped + done.skipped
    report = Report(done.loss, done.gradient_norm, rate, labels, skipped)
    return State(state.step + 1, done.params, done.state, skipped, done.gradient_norm), report


def scale_of_stage(
    max_norm: float | None,
    norm_before: Float[Array, ""],
    root: float,
    norm_of_stage: Float[Array, ""],
) -> float | Float[Array, ""]:
    """Returns the factor that clips the gradients of a stage; `root` is that of their number.

    If the norm of the step before is not known (in the first step) or not finite, each stage is
    clipped to an equal share of `max_norm`, so that together they do not exceed it.
    """
    if max_norm is None:
        return 1.0
    return clip_scale(
        jnp.where(jnp.isfinite(norm_before), norm_before, norm_of_stage * root), max_norm
    )


def clip_or_skip(
    config: TrainConfig, norm: Float[Array, ""], loss: Float[Array, ""]
) -> tuple[float | Float[Array, ""], Bool[Array, ""]]:
    """Returns the factor that clips gradients of this norm, and whether to skip the step."""
    max_norm = config.optimizer.clip_norm
    scale = 1.0 if max_norm is None else clip_scale(norm, max_norm)
    return scale, ~(jnp.isfinite(norm) & jnp.isfinite(loss))


def _number(name: str, value: Any) -> Array:
    """Returns the value of one of the config's own metrics; raises unless it is a real number."""
    dtype = getattr(value, "dtype", type(value))
    kinds = (jnp.floating, jnp.integer, jnp.bool_)
    if not any(jnp.issubdtype(dtype, kind) for kind in kinds) or jnp.shape(value):
        raise UserError(f"metrics[{name!r}] returns {brief(value)}, and must return a real number.")
    return jnp.asarray(value)


def loss_of(graph: Any, rest: Any, trained: Any, microbatch: Any, evaluate: bool = False) -> Loss:
    """Returns the loss of a microbatch, whose arrays are [rows, ...]."""
    loss: Loss = nnx.merge(graph, trained, rest).loss(microbatch, evaluate=evaluate)
    return loss


def held_out_step(graph: Any, params: Any, batch: Any) -> Loss:
    """Returns the loss of a batch of one microbatch, without what is only for training."""
    loss = loss_of(graph, nnx.State({}), params, first_microbatch(batch), evaluate=True)
    return Loss(loss.sum, loss.count, loss.scalars)


def first_microbatch(batch: Any) -> Any:
    """Returns the first microbatch, or the only one."""
    return jax.tree.map(lambda array: array[0], batch)


def summed_gradients(
    loss: Callable[[Any, Any], Loss], params: Any, batch: Any
) -> tuple[Loss, Any, int | Array]:
    """Returns the loss of a batch, gradients, and what to divide them by for those of the mean.

    The gradients are sharded like the parameters. Those of several microbatches are sums. The
    optimizer's `grad_scale` divides them: here it would take another pass over memory.
    """
    microbatches = len(jax.tree.leaves(batch)[0])

    def one(microbatch: Any) -> tuple[Loss, Any]:
        def differentiated(params: Any) -> tuple[Array, Loss]:
            found = loss(params, microbatch)
            return found.mean if microbatches == 1 else found.sum, found

        grads, found = jax.grad(differentiated, has_aux=True)(params)
        # Gradients are reduced to shards as soon as a microbatch is done.
        return found, shard_params(grads)

    if microbatches == 1:
        return *one(first_microbatch(batch)), 1

    def add(sums: Any, microbatch: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, one(microbatch)), None

    found, _ = jax.eval_shape(one, first_microbatch(batch))
    zeros = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), found)
    in_fp32 = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    (found, grads), _ = lax.scan(add, (zeros, in_fp32), batch)
    return found, grads, jnp.maximum(found.count, 1)


def _after_step(
    graph: Any, trained: Any, rest: Any, statistics: Mapping[str, Array], skip: Any
) -> tuple[Any, dict[str, Array]]:
    """Returns the state without gradients, which the model may update, and numbers for the log."""
    model = nnx.merge(graph, trained, rest, copy=True)  # which leaves the variables of `rest`
    if not statistics or not hasattr(model, "after_step"):
        return rest, {}
    numbers: dict[str, Array] = model.after_step(statistics) or {}
    paths = {path for path, _ in nnx.to_flat_state(rest)}
    after, _ = nnx.split_state(nnx.state(model), lambda path, _: tuple(path) in paths, ...)
    return jax.tree.map(lambda new, old: jnp.where(skip, old, new), after, rest), numbers
