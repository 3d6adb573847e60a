"""One step of training, and one of evaluation: the functions that are compiled.

    loss, gradients = (sum of the losses of all labels, its gradient) / number of labels
    parameters      = the optimizer's, with gradients scaled down to the norm `clip_norm`

Arrays of a batch are [accumulation, rows, ...]. Over microbatches the sums are in FP32. A step
whose gradients or loss are not finite changes nothing and is counted; one that releases its
gradients skips only the stages whose gradients are not finite. Parameters and moments are updated
in place; a conditional would copy them.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int32, Num

from coat_jax.errors import UserError
from coat_jax.models import Loss
from coat_jax.models.llama import shard_params
from coat_jax.optax import FusedOptimizer, global_norm, step_by_stages
from coat_jax.optax.clipping import clip_scale
from coat_jax.training.cluster.batches import abstract_batch
from coat_jax.training.cluster.mesh import everywhere
from coat_jax.training.compiler_options import compiler_options
from coat_jax.training.config import TrainConfig
from coat_jax.training.schedule import learning_rate
from coat_jax.training.stages import ReleaseState, scale_of_stage
from coat_jax.training.state import State, split_trained


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
    """What a step reports; the loss is from before the update."""

    loss: Float[Array, ""]
    gradient_norm: Float[Array, ""]  # before clipping
    learning_rate: Float[Array, ""]
    labels: Num[Array, ""]  # that the loss is the mean of
    skipped: Int32[Array, ""]  # steps so far
    metrics: Mapping[str, Array] = {}  # of the model, and added by the config


def lower_step(
    config: TrainConfig,
    graph: Any,
    optimizer: FusedOptimizer,
    state: State,
    mesh: Mesh,
    example: Any = None,
) -> jax.stages.Lowered:
    """`train_step` for a mesh, ready to compile: the state is donated, and keeps its sharding.

    Args:
        config: the run.
        graph: of the model, from `abstract_state`.
        optimizer: from `make_optimizer`.
        state: shapes and shardings, from `abstract_state`.
        mesh: of the run.
        example: a row of a batch; by default the family's.
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
        return jitted.lower(state, abstract_batch(config, mesh, example))


def train_step(
    config: TrainConfig, graph: Any, optimizer: FusedOptimizer, state: State, batch: Any
) -> tuple[State, Report]:
    """The next state, and how the step went.

    Args:
        config: the run.
        graph: of the model.
        optimizer: from `make_optimizer`.
        state: to be donated.
        batch: arrays [accumulation, rows, ...].
    """
    trained, rest = split_trained(config, state.params)
    found, grads = mean_gradients(partial(loss_of, graph, rest), trained, batch)
    loss, norm = found.mean, global_norm(grads)
    scale, skip = clip_or_skip(config, norm, loss)
    trained, moments = optimizer.step(trained, grads, state.moments, grad_scale=scale, skip=skip)
    rest = _after_step(graph, trained, rest, found.statistics, skip)
    params = nnx.merge_state(trained, rest)
    # For the log: the optimizer has a count of its own, and evaluates the schedule itself.
    rate = learning_rate(config.optimizer, config.total_steps, state.step - state.skipped)
    skipped = state.skipped + skip
    step = FinishedStep(params, grads, moments, loss, norm, rate, found.statistics)
    means = {name: Loss(total, found.count).mean for name, total in found.scalars.items()}
    metrics = means | _measured(config, step)
    report = Report(loss, norm, rate, found.count, skipped, metrics)
    return State(state.step + 1, params, moments, skipped), report


def releasing_step(
    config: TrainConfig, graph: Any, optimizer: FusedOptimizer, state: State, batch: Any
) -> tuple[State, Report]:
    """As `train_step`, but the backward pass updates parameters and frees gradients."""
    microbatch = first_microbatch(batch)
    stages, labels = nnx.merge(graph, state.params).stages(microbatch)
    before = state.moments
    scale = partial(scale_of_stage, config.optimizer.clip_norm, before.gradient_norm, len(stages))
    done = step_by_stages(optimizer, stages, state.params, before.inner, grad_scale=scale)
    # For the log, as in `train_step`.
    rate = learning_rate(config.optimizer, config.total_steps, state.step - state.skipped)
    skipped = state.skipped + done.skipped
    report = Report(done.loss, done.gradient_norm, rate, labels, skipped)
    moments = ReleaseState(done.gradient_norm, done.state)
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


def loss_of(graph: Any, rest: Any, trained: Any, microbatch: Any, evaluate: bool = False) -> Loss:
    """The loss of a microbatch, whose arrays are [rows, ...]."""
    loss: Loss = nnx.merge(graph, trained, rest).loss(microbatch, evaluate=evaluate)
    return loss


def held_out_step(graph: Any, params: Any, batch: Any) -> Loss:
    """The loss of a batch of one microbatch, without what is only for training."""
    loss = loss_of(graph, nnx.State({}), params, first_microbatch(batch), evaluate=True)
    return Loss(loss.sum, loss.count, loss.scalars)


def first_microbatch(batch: Any) -> Any:
    """The first microbatch, or the only one."""
    return jax.tree.map(lambda array: array[0], batch)


def mean_gradients(loss: Callable[[Any, Any], Loss], params: Any, batch: Any) -> tuple[Loss, Any]:
    """The loss of a batch, and the gradients of its mean; they are sharded like the parameters."""
    microbatches = len(jax.tree.leaves(batch)[0])

    def one(microbatch: Any) -> tuple[Loss, Any]:
        def differentiated(params: Any) -> tuple[Array, Loss]:
            found = loss(params, microbatch)
            return found.mean if microbatches == 1 else found.sum, found

        grads, found = jax.grad(differentiated, has_aux=True)(params)
        # Gradients are reduced to shards as soon as a microbatch is done.
        return found, shard_params(grads)

    if microbatches == 1:
        return one(first_microbatch(batch))

    def add(sums: Any, microbatch: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, one(microbatch)), None

    found, _ = jax.eval_shape(one, first_microbatch(batch))
    zeros = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), found)
    in_fp32 = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    (found, grads), _ = lax.scan(add, (zeros, in_fp32), batch)
    return found, jax.tree.map(lambda g: g / jnp.maximum(found.count, 1), grads)


def _after_step(graph: Any, trained: Any, rest: Any, statistics: Any, skip: Any) -> Any:
    """The state without gradients after a step, which the model may update."""
    model = nnx.merge(graph, trained, rest)
    if not hasattr(model, "after_step"):
        return rest
    model.after_step(statistics)
    paths = {path for path, _ in nnx.to_flat_state(rest)}
    after, _ = nnx.split_state(nnx.state(model), lambda path, _: tuple(path) in paths, ...)
    return jax.tree.map(lambda new, old: jnp.where(skip, old, new), after, rest)
