"""Creates models on a mesh, where each device makes its own shards; counts their parameters.

Values depend only on the seed, not on the mesh or on `scan`. 16-bit values are the FP32 values,
rounded.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType, Mesh

from coat_jax.errors import UserError
from coat_jax.models.llama import Llama
from coat_jax.models.protocol import ModelConfig
from coat_jax.nn import MeshAxes
from coat_jax.validation import Seed, require


def create(
    config: Any, *, seed: int = 0, mesh: Mesh | None = None, module: Callable[..., Any] = Llama
) -> Any:
    """A model with random parameters, sharded along `config.axes`: no device ever holds all of it.

    Args:
        config: the model.
        seed: the seed of the values, from 0 to 2^32 - 1.
        mesh: with automatic axes; by default the one that is set, if any.
        module: the class of the model.
    """
    mesh = _checked_mesh(config, mesh)
    seed = require("seed", seed, Seed)
    graph, _ = abstract(config, mesh=mesh, module=module)
    with _mesh_set(mesh):
        values = _initializer(module, config, mesh)(jax.random.key(seed))
    return nnx.merge(graph, values)


@functools.lru_cache(maxsize=32)
def _initializer(
    module: Callable[..., Any], config: Any, mesh: Mesh | None
) -> Callable[[jax.Array], Any]:
    """Makes the parameters of a model from a key, in programs that all models of a config share.

    Layers are made stacked, by a program as long as one layer, and unstacked afterwards.
    """
    stacked = dataclasses.replace(config, scan=True)

    def initialize(key: jax.Array) -> Any:
        return nnx.state(module(stacked, rngs=nnx.Rngs(key)))

    shardings = None
    if mesh is not None:
        shardings = nnx.get_named_sharding(abstract(stacked, mesh=mesh, module=module)[1], mesh)
    made = jax.jit(initialize, out_shardings=shardings)
    if config.scan:
        return made
    return _unstacking(config.STACK, made, abstract(config, mesh=mesh, module=module)[1])


def _unstacking(
    stack: str, made: Callable[[jax.Array], Any], state: Any
) -> Callable[[jax.Array], Any]:
    """Wraps `made`: the layers of its result are unstacked into a list, as in `state`.

    Arrays are unstacked one at a time, and each is freed before the next, whose layers can then
    take its place. Unstacking all of them at once would take the memory of two models, and would
    leave the free memory in two pieces.
    """
    flat = dict(nnx.to_flat_state(state))

    @functools.cache
    def unstack(sharding: Any) -> Callable[[jax.Array], list[jax.Array]]:
        return jax.jit(list, out_shardings=sharding)

    def initialize(key: jax.Array) -> Any:
        stacked = {path: leaf[...] for path, leaf in nnx.to_flat_state(made(key))}
        values: dict[Any, jax.Array] = {}
        for path in sorted(stacked, key=lambda path: stacked[path].nbytes, reverse=True):
            array = stacked.pop(path)
            if stack not in path:
                values[path] = array
                continue
            at = path.index(stack) + 1
            of_layers = [(*path[:at], i, *path[at:]) for i in range(len(array))]
            layers = unstack(flat[of_layers[0]].sharding)(array)
            values |= zip(of_layers, layers, strict=True)
            array.delete()  # The Variables that hold it live until Python collects garbage.
        return nnx.from_flat_state(
            {path: leaf.replace(values[path]) for path, leaf in flat.items()}
        )

    return initialize


def abstract(
    config: Any, *, mesh: Mesh | None = None, module: Callable[..., Any] = Llama
) -> tuple[Any, Any]:
    """A model without its numbers: its graph, and a state of shapes, dtypes and shardings.

    Args:
        config: the model.
        mesh: see `create`.
        module: see `create`.
    """
    mesh = _checked_mesh(config, mesh)
    with _mesh_set(mesh):
        model = _abstract_model(module, config)
    graph, state = nnx.split(model)
    return graph, state if mesh is None else with_shardings(state, mesh)


def with_shardings(state: Any, mesh: Mesh) -> Any:
    """The shapes and dtypes of a state, with the shardings on a mesh that its variables name."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        state,
        nnx.get_named_sharding(state, mesh),
    )


def _abstract_model(module: Callable[..., Any], config: Any) -> Any:
    """A model of shapes. Flax takes long for each parameter: one layer of Llama stands for all."""
    one_for_all = module is Llama and not config.scan
    one = dataclasses.replace(config, layers=1) if one_for_all else config
    model = nnx.eval_shape(lambda: module(one, rngs=nnx.Rngs(0)))
    if one_for_all:
        model.layers = nnx.List([nnx.clone(model.layers[0]) for _ in range(config.layers)])
        model.config = config
    return model


def parameters_count(config: Any) -> int:
    """How many numbers a model learns."""
    whole = dataclasses.replace(config, scan=True, axes=MeshAxes())
    model = nnx.eval_shape(lambda: Llama(whole, rngs=nnx.Rngs(0)))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def mesh_that_is_set() -> Mesh:
    """The mesh of `jax.set_mesh`; an empty one without it.

    Raises:
        UserError: inside jit, where no model can be made.
    """
    try:
        return jax.sharding.get_mesh()
    except ValueError:
        raise UserError(
            "Models are not made inside jit, nnx.jit or eval_shape: coat.models.create compiles by "
            "itself. Call it outside. For shapes alone, coat.models.abstract(config) returns a "
            "graph and a state without numbers."
        ) from None


def _mesh_set(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def _checked_mesh(config: Any, mesh: Mesh | None) -> Mesh | None:
    """The mesh to use, if any; raises unless it fits the model."""
    if not isinstance(config, ModelConfig):
        raise TypeError(
            f"A model is made from a config, such as coat.models.Config, not from {config!r}. "
            "Published ones have names: coat.models.config_of('llama2_7b')."
        )
    if mesh is None:
        mesh = mesh_that_is_set()
    if mesh.empty:
        if any(dataclasses.astuple(config.axes)):
            raise UserError(
                f"axes={config.axes} names axes of a mesh, and there is none. Pass mesh=, call "
                "this under jax.set_mesh(mesh), or leave axes at MeshAxes()."
            )
        return None
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise UserError(
            f"The axes of the mesh are {mesh.axis_types}, and must be automatic. Make it with "
            "jax.make_mesh(sizes, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))."
        )
    for role, sizes in config.sharded_sizes().items():
        axis = getattr(config.axes, role)
        if axis is None:
            continue
        if axis not in mesh.shape:
            raise UserError(
                f"axes.{role}={axis!r} is not an axis of the mesh, which has {mesh.axis_names}."
            )
        for name, size in sizes.items():
            if size % mesh.shape[axis]:
                raise UserError(
                    f"{name}={size} cannot be sharded over {mesh.shape[axis]} devices along "
                    f"{axis!r}. Make it a multiple (a vocabulary may be padded), or this axis "
                    "smaller."
                )
    return mesh
