"""The state of a run between two steps: one tree of arrays, donated, saved and restored whole.

It has no random number generator: the order of the data and all rounding follow from hashes of the
config's seed and the step's number.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Int32

from coat_jax import models
from coat_jax.errors import UserError
from coat_jax.optax import FusedOptimizer, state_shardings
from coat_jax.training.checkpoint import weights
from coat_jax.training.cluster.mesh import everywhere
from coat_jax.training.config import TrainConfig

# Fields that a run sets for itself, whatever model it begins from.
OF_THE_RUN = {"context", "scan", "remat", "param_dtype", "dtype", "precision"}
OF_THE_RUN |= {"axes", "batch_axes"}


class State(NamedTuple):
    """A training state.

    Attributes:
        step: how many steps were taken, skipped ones included.
        params: the state of the NNX model.
        moments: the optimizer's state; each leaf is sharded as its parameter is.
        skipped: how many of the steps had gradients or a loss that were not finite.
    """

    step: Int32[Array, ""]
    params: Any
    moments: Any
    skipped: Int32[Array, ""]


def abstract_state(config: TrainConfig, optimizer: FusedOptimizer, mesh: Mesh) -> tuple[Any, State]:
    """The model's graph, and a state of shapes, dtypes and shardings."""
    graph, params = models.abstract(config.model_on_mesh, mesh=mesh)
    with jax.set_mesh(mesh):  # which decides what annotations of Flax fit the state
        moments = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            jax.eval_shape(optimizer.init, params),
            state_shardings(optimizer, params),
        )
    count: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere(mesh))
    return graph, State(count, params, moments, count)


def require_same_model(config: TrainConfig) -> None:
    """Raises unless the folder to begin from holds the config's model and its parameters."""
    if config.init_from is None:
        return
    weights.require_not_quantized(config.init_from, "Training")
    theirs = weights.model_config(config.init_from)
    differ = [
        f"{field.name} is {there!r} there and {here!r} in the config"
        for field in dataclasses.fields(theirs)
        if field.name not in OF_THE_RUN
        and (there := getattr(theirs, field.name)) != (here := getattr(config.model, field.name))
    ]
    if differ:
        raise UserError(
            f"{config.init_from} holds another model: {'; '.join(differ[:4])}. Make the config's "
            "model from that of the folder: dataclasses.replace(weights.model_config(FOLDER), ..), "
            "from coat_jax.training.checkpoint import weights."
        )
    weights.require_parameters(config.init_from, config.model)


def new_state(config: TrainConfig, optimizer: FusedOptimizer, mesh: Mesh) -> State:
    """The state before the first step, every device making or reading its own part."""
    if config.init_from is None:
        model = models.create(config.model_on_mesh, seed=config.seed, mesh=mesh)
    else:
        model = weights.load(config.init_from, config.model_on_mesh, mesh=mesh)
    params = nnx.state(model)
    with jax.set_mesh(mesh):  # as in abstract_state
        moments = jax.jit(optimizer.init, out_shardings=state_shardings(optimizer, params))(params)
    step, skipped = (jax.device_put(jnp.zeros([], jnp.int32), everywhere(mesh)) for _ in range(2))
    return State(step, params, moments, skipped)
