"""A run before anything is compiled or placed on a device.

prepared = prepare(config, make_mesh(config.mesh))
program = prepared.lower().compile()
state = prepared.new_state()
state, report = program(state, batch)
"""

from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from coat_jax.optax import FusedOptimizer
from coat_jax.training.config import TrainConfig
from coat_jax.training.optimizer import make_optimizer, require_no_extra_args
from coat_jax.training.state import State, abstract_state, new_state, split_trained
from coat_jax.training.step import lower_step


class TrainSetup(NamedTuple):
    """What the step of a run is compiled from.

    Attributes:
        config: the run.
        mesh: of the run.
        optimizer: as `make_optimizer` makes it.
        graph: of the model.
        abstract: the shapes, dtypes and shardings of the state.
    """

    config: TrainConfig
    mesh: Mesh
    optimizer: FusedOptimizer
    graph: Any
    abstract: State

    def lower(self, example: Any = None) -> jax.stages.Lowered:
        """The step, ready to compile; see `lower_step`."""
        return lower_step(
            self.config, self.graph, self.optimizer, self.abstract, self.mesh, example
        )

    def new_state(self) -> State:
        """The state before the first step."""
        return new_state(self.config, self.optimizer, self.mesh)


def prepare(
    config: TrainConfig, mesh: Mesh, *, optimizer: FusedOptimizer | None = None
) -> TrainSetup:
    """Builds the optimizer, and the shapes of model and state; takes no memory of a device.

    Args:
        config: the run.
        mesh: from `make_mesh`.
        optimizer: replaces the one that the config names.
    """
    optimizer = optimizer or make_optimizer(config)
    graph, abstract = abstract_state(config, optimizer, mesh)
    if config.optimizer.transformation is not None:
        with jax.set_mesh(mesh):
            trained, _ = split_trained(config, abstract.params)
            require_no_extra_args(optimizer, trained, abstract.moments)
    return TrainSetup(config, mesh, optimizer, graph, abstract)
