"""The state of a run between two steps: one tree of arrays, donated, saved and restored whole.

It has no random number generator: the order of the data and all rounding follow from hashes of the
config's seed and the step's number.
"""

import dataclasses
from fnmatch import fnmatchcase
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
from coat_jax.training.families import family_of

# Fields that a run sets for itself, whatever model it begins from.
OF_THE_RUN = {"context", "scan", "remat", "param_dtype", "dtype", "precision", "z_loss"}
OF_THE_RUN |= {"axes", "batch_axes"}


class State(NamedTuple):
    """A training state.

    Attributes:
        step: how many steps were taken, skipped ones included.
        params: the state of the NNX model.
        moments: the optimizer's state, of the parameters that are trained; each leaf is sharded as
            its parameter is.
        skipped: how many of the steps had gradients or a loss that were not finite.
    """

    step: Int32[Array, ""]
    params: Any
    moments: Any
    skipped: Int32[Array, ""]


def abstract_state(config: TrainConfig, optimizer: FusedOptimizer, mesh: Mesh) -> tuple[Any, State]:
    """The model's graph, and a state of shapes, dtypes and shardings."""
    module = family_of(config.model).module
    graph, params = models.abstract(config.model_on_mesh, mesh=mesh, module=module)
    require_frozen(config, params)
    trained, _ = split_trained(config, params)
    with jax.set_mesh(mesh):  # which decides what annotations of Flax fit the state
        moments = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            jax.eval_shape(optimizer.init, trained),
            state_shardings(optimizer, trained),
        )
    count: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere(mesh))
    return graph, State(count, params, moments, count)


def split_trained(config: TrainConfig, params: Any) -> tuple[Any, Any]:
    """The parameters that have gradients and moments, and the rest of a model's state."""

    def is_trained(path: tuple[Any, ...], variable: Any) -> bool:
        is_param = issubclass(getattr(variable, "type", type(variable)), nnx.Param)
        return is_param and not any(fnmatchcase(_dotted(path), glob) for glob in config.frozen)

    trained, rest = nnx.split_state(params, is_trained, ...)
    return trained, rest


def require_frozen(config: TrainConfig, params: Any) -> None:
    """Raises if `frozen` has a glob that matches nothing, or freezes everything."""
    paths = [_dotted(path) for path, _ in nnx.to_flat_state(params)]
    for glob in config.frozen:
        if not any(fnmatchcase(path, glob) for path in paths):
            raise UserError(
                f"frozen={glob!r} matches no parameter. They are named {', '.join(paths[:4])}, ..."
            )
    if config.frozen and not jax.tree.leaves(split_trained(config, params)[0]):
        raise UserError(f"frozen={config.frozen} leaves no parameter to train.")


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


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
        module = family_of(config.model).module
        model = models.create(config.model_on_mesh, seed=config.seed, mesh=mesh, module=module)
    else:
        model = weights.load(config.init_from, config.model_on_mesh, mesh=mesh)
    params = nnx.state(model)
    trained, _ = split_trained(config, params)
    with jax.set_mesh(mesh):  # as in abstract_state
        shardings = state_shardings(optimizer, trained)
        moments = jax.jit(optimizer.init, out_shardings=shardings)(trained)
    step, skipped = (jax.device_put(jnp.zeros([], jnp.int32), everywhere(mesh)) for _ in range(2))
    return State(step, params, moments, skipped)
