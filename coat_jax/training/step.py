"""One step of training, and one of evaluation: the functions that are compiled.

    loss, gradients = sum over microbatches of their share of the labels * (mean loss, gradient)
    parameters      = the optimizer's, with gradients scaled down to the norm `clip_norm`

A batch is [accumulation, rows, sequence]. The microbatches together have the loss and gradients of
one large batch, summed in FP32. A step whose gradients or loss are not finite changes nothing and
is counted; one that releases its gradients skips only the stages whose gradients are not finite.
Parameters and moments are updated in place; a conditional would copy them.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int32

from coat_jax.errors import UserError
from coat_jax.optax import FusedOptimizer, global_norm, step_by_stages
from coat_jax.optax.clipping import clip_scale
from coat_jax.training.cluster.batches import abstract_batch
from coat_jax.training.cluster.mesh import everywhere
from coat_jax.training.compiler_options import compiler_options
from coat_jax.training.config import TrainConfig
from coat_jax.training.data import Batch
from coat_jax.training.schedule import learning_rate
from coat_jax.training.stages import Released, scale_of_stage, stages_of
from coat_jax.training.state import State


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
    """

    params: Any
    grads: Any
    moments: Any
    loss: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    learning_rate: Float[Array, ""]


class Report(NamedTuple):
    """What a step reports; the loss is from before the update."""

    loss: Float[Array, ""]
    gradient_norm: Float[Array, ""]  # before clipping
    learning_rate: Float[Array, ""]
    labels: Int32[Array, ""]  # tokens that the loss is the mean of
    skipped: Int32[Array, ""]  # steps so far
    metrics: Mapping[str, Array] = {}  # added by the config


class HeldOut(NamedTuple):
    """The sum of the losses over labels, and their number; both add up over batches."""

    loss: Float[Array, ""]
    labels: Int32[Array, ""]


def lower_step(
    config: TrainConfig,
    graph: Any,
    optimizer: FusedOptimizer,
    state: State,
    mesh: Mesh,
    *,
    packed: bool = False,
) -> jax.stages.Lowered:
    """`train_step` for a mesh, ready to compile: the state is donated, and keeps its sharding.

    Args:
        config: the run.
        graph: of the model, from `abstract_state`.
        optimizer: from `make_optimizer`.
        state: shapes and shardings, from `abstract_state`.
        mesh: of the run.
        packed: whether a row of a batch is several texts.
    """
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state), everywhere(mesh)
    kind = releasing_step if config.optimizer.release_gradients else train_step
    step = partial(kind, config, graph, optimizer)
    jitted = jax.jit(
        step,
        donate_argnums=0,
        out_shardings=shardings,
        compiler_options=compiler_options(config, mesh),
    )
    with jax.set_mesh(mesh):
        return jitted.lower(state, abstract_batch(config, mesh, packed=packed))


def train_step(
    config: TrainConfig, graph: Any, optimizer: FusedOptimizer, state: State, batch: Batch
) -> tuple[State, Report]:
    """The next state, and how the step went.

    Args:
        config: the run.
        graph: of the model.
        optimizer: from `make_optimizer`.
        state: to be donated.
        batch: arrays [accumulation, rows, sequence].
    """
    labels = jnp.sum(batch.labels >= 0)
    share_of_loss = partial(microbatch_loss, config, graph, labels)
    loss, grads = _sum_over_microbatches(jax.value_and_grad(share_of_loss), state.params, batch)
    norm = global_norm(grads)
    scale, skip = clip_or_skip(config, norm, loss)
    params, moments = optimizer.step(
        state.params, grads, state.moments, grad_scale=scale, skip=skip
    )
    # For the log: the optimizer has a count of its own, and evaluates the schedule itself.
    rate = learning_rate(config.optimizer, config.total_steps, state.step - state.skipped)
    skipped = state.skipped + skip
    metrics = _measured(config, FinishedStep(params, grads, moments, loss, norm, rate))
    report = Report(loss, norm, rate, labels, skipped, metrics)
    return State(state.step + 1, params, moments, skipped), report


def releasing_step(
    config: TrainConfig, graph: Any, optimizer: FusedOptimizer, state: State, batch: Batch
) -> tuple[State, Report]:
    """As `train_step`, but the backward pass updates parameters and frees gradients."""
    microbatch = jax.tree.map(lambda array: array[0], batch)
    stages = stages_of(graph, state.params, microbatch, config.z_loss)
    before = state.moments
    scale = partial(scale_of_stage, config.optimizer.clip_norm, before.gradient_norm, len(stages))
    done = step_by_stages(optimizer, stages, state.params, before.inner, grad_scale=scale)
    # For the log, as in `train_step`.
    rate = learning_rate(config.optimizer, config.total_steps, state.step - state.skipped)
    skipped = state.skipped + done.skipped
    report = Report(done.loss, done.gradient_norm, rate, jnp.sum(microbatch.labels >= 0), skipped)
    moments = Released(done.gradient_norm, done.state)
    return State(state.step + 1, done.params, moments, skipped), report


def clip_or_skip(
    config: TrainConfig, norm: Float[Array, ""], loss: Float[Array, ""]
) -> tuple[float | Float[Array, ""], Bool[Array, ""]]:
    """The factor that clips gradients of this norm, and whether to skip the step."""
    max_norm = config.optimizer.clip_norm
    scale = 1.0 if max_norm is None else clip_scale(norm, max_norm)
    return scale, ~(jnp.isfinite(norm) & jnp.isfinite(loss))


def _measured(config: TrainConfig, step: FinishedStep) -> dict[str, Array]:
    """The values of the config's own metrics."""
    found = {}
    for name, measure in config.metrics.items():
        value = measure(step)
        what = "a tree of arrays"
        if jax.tree_util.all_leaves([value]):
            shape, dtype = jnp.shape(value), getattr(value, "dtype", type(value))
            what = f"{dtype}{list(shape)}" if shape else str(dtype)
            real = isinstance(value, bool | int | float) or any(
                jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_)
            )
            if real and not shape:
                found[name] = jnp.asarray(value)
                continue
        raise UserError(f"metrics[{name!r}] returns {what}, and must return one real number.")
    return found


def microbatch_loss(
    config: TrainConfig, graph: Any, label_count: Array, params: Any, microbatch: Batch
) -> Float[Array, ""]:
    """A microbatch's loss, weighted by its share of the batch's labels; these add up to the mean.

    Args:
        config: the run.
        graph: of the model.
        label_count: how many labels the whole batch has.
        params: of the model.
        microbatch: arrays [rows, sequence].
    """
    share = jnp.sum(microbatch.labels >= 0) / jnp.maximum(label_count, 1)
    return share * _loss(graph, params, microbatch, config.z_loss)


def held_out_step(graph: Any, params: Any, batch: Batch) -> HeldOut:
    """The loss of a batch [1, rows, sequence], without a z-loss."""
    microbatch = jax.tree.map(lambda array: array[0], batch)
    labels = jnp.sum(microbatch.labels >= 0)
    return HeldOut(labels * _loss(graph, params, microbatch, 0.0), labels)


def _loss(graph: Any, params: Any, microbatch: Batch, z_loss: float) -> Float[Array, ""]:
    """The mean over the labels of one microbatch."""
    model = nnx.merge(graph, params)
    rows = microbatch.tokens, microbatch.labels, microbatch.positions, microbatch.segments
    loss: Array = model.loss(*rows, z_loss=z_loss)
    return loss


def _sum_over_microbatches(
    value_and_grad: Callable[[Any, Batch], tuple[Array, Any]], params: Any, batch: Batch
) -> tuple[Array, Any]:
    """The sums of values and gradients; gradients are sharded like the parameters."""

    def one(microbatch: Batch) -> tuple[Array, Any]:
        loss, grads = value_and_grad(params, microbatch)
        # Gradients are reduced to shards as soon as a microbatch is done.
        return loss, lax.with_sharding_constraint(grads, nnx.get_partition_spec(params))

    if batch.tokens.shape[0] == 1:
        return one(jax.tree.map(lambda array: array[0], batch))

    def add(sums: Any, microbatch: Batch) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, one(microbatch)), None

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    return lax.scan(add, (jnp.zeros([]), zeros), batch)[0]
