"""What a run is made of between two steps: one tree of arrays, donated, saved and restored whole.

There is no generator of random numbers in it: the order of the data and all rounding are hashed
from the config's seed and the step's number.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Int32

from coat_jax import models
from coat_jax.optax import state_shardings
from coat_jax.training.config import TrainConfig
from coat_jax.training.mesh import everywhere
from coat_jax.training.optimizer import Optimizer


class State(NamedTuple):
    """A training state.

    step counts all steps, skipped those among them that changed nothing; params is the state of
    the NNX model, and moments that of the optimizer, each leaf cut as its parameter is.
    """

    step: Int32[Array, ""]
    params: Any
    moments: Any
    skipped: Int32[Array, ""]


def abstract_state(config: TrainConfig, optimizer: Optimizer, mesh: Mesh) -> tuple[Any, State]:
    """The model's graph, and a state of shapes, dtypes and shardings."""
    graph, params = models.abstract(config.model_on_mesh, mesh=mesh)
    moments = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(optimizer.init, params),
        state_shardings(optimizer, params),
    )
    count: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere(mesh))
    return graph, State(count, params, moments, count)


def new_state(config: TrainConfig, optimizer: Optimizer, mesh: Mesh) -> State:
    """The state before the first step, every device making or reading its own part."""
    if config.init_from is None:
        model = models.create(config.model_on_mesh, seed=config.seed, mesh=mesh)
    else:
        model = models.hf.load(config.init_from, config.model_on_mesh, mesh=mesh)
    params = nnx.state(model)
    moments = jax.jit(optimizer.init, out_shardings=state_shardings(optimizer, params))(params)
    step, skipped = (jax.device_put(jnp.zeros([], jnp.int32), everywhere(mesh)) for _ in range(2))
    return State(step, params, moments, skipped)
