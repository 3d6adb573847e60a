"""What a run is compiled from, its state before the first step, and its compiled steps.

setup = prepare(config, make_mesh(config.mesh))
program = setup.lower().compile()
state = setup.new_state()
state, report = program(state, batch)
"""

import dataclasses
import fnmatch
import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from coat_jax import models
from coat_jax.errors import UserError
from coat_jax.models.lazy_arrays import dotted_name
from coat_jax.optax import InPlaceOptimizer, state_shardings
from coat_jax.training.checkpoint import weights
from coat_jax.training.cluster.mesh import abstract_batch, batch_parts, everywhere
from coat_jax.training.compilation import compiler_options
from coat_jax.training.config import TrainConfig
from coat_jax.training.families import family_of, name_of
from coat_jax.training.optimizer import make_optimizer
from coat_jax.training.report import accounting
from coat_jax.training.step import State, releasing_step, split_trained, train_step

if TYPE_CHECKING:
    from rich.console import Console

# Fields of a model that a run sets for itself, whatever model it begins from.
OF_THE_RUN = {"context", "z_loss", "aux_loss", "bias_rate", "tower_precision"}
OF_THE_RUN |= {"latents", "attention", "shift"}
OF_THE_RUN |= {field.name for field in dataclasses.fields(models.ModelConfig)}


class TrainSetup(NamedTuple):
    """A run before anything is compiled or placed on a device; see `prepare`."""

    config: TrainConfig
    mesh: Mesh
    optimizer: InPlaceOptimizer
    graph: Any  # of the model
    abstract: State  # the shapes, dtypes and shardings of the state
    batch: Any  # those of a batch

    def lower(self) -> jax.stages.Lowered:
        """Returns the step, ready to compile: it donates the state and keeps its sharding."""
        step = releasing_step if self.config.optimizer.release_gradients else train_step
        jitted = jax.jit(
            partial(step, self.config, self.graph, self.optimizer),
            donate_argnums=0,
            out_shardings=(
                jax.tree.map(lambda leaf: leaf.sharding, self.abstract),
                everywhere(self.mesh),
            ),
            compiler_options=compiler_options(self.config, self.mesh),
        )
        with jax.set_mesh(self.mesh):
            return jitted.lower(self.abstract, self.batch)

    def new_state(self) -> State:
        """Returns the state before the first step, every device making or reading its own part."""
        config, scalar = self.config, everywhere(self.mesh)
        if config.init_from is None:
            module = family_of(config.model).module
            model = models.create(
                config.model_on_mesh, seed=config.seed, mesh=self.mesh, module=module
            )
        else:
            model = weights.load(config.init_from, config.model_on_mesh, mesh=self.mesh)
        params = nnx.state(model)
        with jax.set_mesh(self.mesh):  # as in `prepare`
            shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract.moments)
            init = jax.jit(self.optimizer.init, out_shardings=shardings)
            moments = init(split_trained(config, params)[0])
        # Two arrays, because both are donated.
        step, skipped = (jax.device_put(jnp.int32(0), scalar) for _ in range(2))
        norm = ()
        if config.optimizer.release_gradients:
            norm = jax.device_put(jnp.float32(jnp.nan), scalar)
        return State(step, params, moments, skipped, norm)


def prepare(
    config: TrainConfig,
    mesh: Mesh,
    *,
    optimizer: InPlaceOptimizer | None = None,
    example: Any = None,
) -> TrainSetup:
    """Builds the optimizer, and the shapes of model and state; takes no memory of a device.

    `optimizer` replaces the one that the config names, and `example` is a row of a batch in place
    of the family's.
    """
    optimizer = optimizer or make_optimizer(config)
    module = family_of(config.model).module
    graph, params = models.abstract(config.model_on_mesh, mesh=mesh, module=module)
    trained, _ = split_trained(config, params)
    paths = [dotted_name(path) for path, _ in nnx.to_flat_state(params)] if config.frozen else []
    for glob in config.frozen:
        if not fnmatch.filter(paths, glob):
            raise UserError(
                f"frozen={glob!r} matches no parameter. They are named {', '.join(paths[:4])}, ..."
            )
    if not jax.tree.leaves(trained):
        raise UserError(f"frozen={config.frozen} leaves no parameter to train.")
    with jax.set_mesh(mesh):  # which decides what annotations of Flax fit the state
        moments = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            jax.eval_shape(optimizer.init, trained),
            state_shardings(optimizer, trained),
        )
    scalar: Any = partial(jax.ShapeDtypeStruct, (), sharding=everywhere(mesh))
    norm = scalar(jnp.float32) if config.optimizer.release_gradients else ()
    state = State(scalar(jnp.int32), params, moments, scalar(jnp.int32), norm)
    batch = abstract_batch(config, mesh, example)
    return TrainSetup(config, mesh, optimizer, graph, state, batch)


def require_same_model(folder: str, model: models.ModelConfig) -> None:
    """Raises unless a folder to begin from holds this model and its parameters."""
    weights.require_not_quantized(folder, "Training")
    theirs = weights.model_config(folder)
    if type(theirs) is not type(model):
        kinds = " and ".join(map(name_of, (theirs, model)))
        raise UserError(f"{folder} and the config have models of different families: {kinds}.")
    if differ := _differences(theirs, model):
        raise UserError(
            f"{folder} holds another model: {'; '.join(differ[:4])}. Make the config's "
            "model from that of the folder: dataclasses.replace(weights.model_config(FOLDER), ..), "
            "from coat_jax.training.checkpoint import weights."
        )
    weights.require_parameters(folder, model)


def _differences(theirs: Any, ours: Any, prefix: str = "") -> list[str]:
    """Returns in which sizes and features models differ, those of their parts included."""
    found = []
    for field in dataclasses.fields(theirs):
        there, here = (getattr(config, field.name) for config in (theirs, ours))
        part = isinstance(there, models.ModelConfig | models.Experts)
        if part and type(here) is type(there):
            found += _differences(there, here, f"{prefix}{field.name}.")
        elif there != here and not _is_of_the_run(field.name, there, here):
            found.append(f"{prefix}{field.name} is {there!r} there and {here!r} in the config")
    return found


def _is_of_the_run(name: str, there: Any, here: Any) -> bool:
    # Biases of routers are parameters; there are none where their rate is 0.
    return name in OF_THE_RUN and (name != "bias_rate" or bool(there) == bool(here))


def compile_steps(setup: TrainSetup, console: "Console", *, done: int = 0) -> dict[int, Any]:
    """Compiles the programs that a run still needs after `done` steps, and prints their memory.

    There is one for the first steps in BF16, and one for the others. The result has each by the
    number of steps that come before its first one.
    """
    config, in_bf16 = setup.config, setup.config.steps_in_bf16
    programs = {}
    if max(done, in_bf16) < config.total_steps:
        programs[max(done, in_bf16)] = _compile(setup, console, "the step")
    if done < in_bf16:
        bf16 = prepare(config.bf16_phase, setup.mesh, optimizer=setup.optimizer)
        what = f"the first {in_bf16:,} steps, in BF16,"
        programs[done] = _compile(bf16._replace(batch=setup.batch), console, what)
    return programs


def _compile(setup: TrainSetup, console: "Console", what: str) -> Any:
    begin = time.perf_counter()
    program = setup.lower().compile()
    seconds = time.perf_counter() - begin
    parts, device = batch_parts(setup.mesh), setup.mesh.local_devices[0]
    memory = accounting.account(
        setup.config, setup.abstract, program, batch_parts=parts, device=device
    )
    console.print(accounting.table(memory))
    console.print(f"Compiled {what} in {seconds:.1f} s.", highlight=False)
    if memory.limit is not None and memory.peak > memory.limit:
        text = f"It will not fit the device. {accounting.ADVICE}"
        console.print(text, style="bold red", highlight=False)
    return program
