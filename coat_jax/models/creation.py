"""Creates models on a mesh, where each device makes its own shards.

Values depend only on the seed, not on the mesh or on `scan`. 16-bit values are the FP32 values,
rounded.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType, Mesh

from coat_jax.errors import UserError
from coat_jax.models.llama import Llama
from coat_jax.models.protocol import ModelConfig
from coat_jax.precision import BF16
from coat_jax.validation import Seed, require


def create(
    config: Any, *, seed: int = 0, mesh: Mesh | None = None, module: Callable[..., Any] = Llama
) -> Any:
    """A model with random parameters, sharded along `config.axes`: no device ever holds all of it.

    Layers are made stacked, by a program as long as one layer, and unstacked afterwards.

    Args:
        config: the model.
        seed: the seed of the values, from 0 to 2^32 - 1.
        mesh: with automatic axes; by default the one that is set, if any.
        module: the class of the model.
    """
    mesh, seed = _checked_mesh(config, mesh), require("seed", seed, Seed)
    graph, state = abstract(config, mesh=mesh, module=module)
    # Neither changes the values: models in BF16 and in FP8 share a program.
    stacked = dataclasses.replace(config, scan=True, precision=BF16, remat=None)
    initialize = _initializer(module, stacked, mesh)
    with jax.set_mesh(mesh):
        values = initialize(jax.random.key(seed))
    return nnx.merge(graph, values if config.scan else _unstack(config.STACK, values, state))


@functools.lru_cache(maxsize=32)
def _initializer(
    module: Callable[..., Any], stacked: Any, mesh: Mesh
) -> Callable[[jax.Array], Any]:
    """Makes the parameters of a model from a key, in a program that models of a kind share."""
    shardings = None
    if not mesh.empty:
        shardings = nnx.get_named_sharding(abstract(stacked, mesh=mesh, module=module)[1], mesh)
    return jax.jit(
        lambda key: nnx.state(module(stacked, rngs=nnx.Rngs(key))), out_shardings=shardings
    )


def _unstack(stack: str, values: Any, state: Any) -> Any:
    """The values of stacked layers, in a list of layers as in `state`.

    Arrays are unstacked one at a time, and each is freed before the next, whose layers can then
    take its place. Unstacking all of them at once would take the memory of two models, and would
    leave the free memory in two pieces.
    """
    flat = dict(nnx.to_flat_state(state))
    stacked = {path: leaf[...] for path, leaf in nnx.to_flat_state(values)}
    for path in sorted(stacked, key=lambda path: stacked[path].nbytes, reverse=True):
        array = stacked.pop(path)
        if stack not in path:
            flat[path] = flat[path].replace(array)
            continue
        at = path.index(stack) + 1
        of_layers = [(*path[:at], i, *path[at:]) for i in range(len(array))]
        unstacked = jax.jit(list, out_shardings=flat[of_layers[0]].sharding)(array)
        flat |= {p: flat[p].replace(x) for p, x in zip(of_layers, unstacked, strict=True)}
        array.delete()  # The Variables that hold it live until Python collects garbage.
    return nnx.from_flat_state(flat)


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
    # Flax takes long for each parameter: one layer of Llama stands for all.
    one_for_all = module is Llama and not config.scan
    one = dataclasses.replace(config, layers=1) if one_for_all else config
    with jax.set_mesh(mesh):
        model = nnx.eval_shape(lambda: module(one, rngs=nnx.Rngs(0)))
    if one_for_all:
        model.layers = nnx.List([nnx.clone(model.layers[0]) for _ in range(config.layers)])
        model.config = config
    graph, state = nnx.split(model)
    return graph, state if mesh.empty else with_shardings(state, mesh)


def with_shardings(state: Any, mesh: Mesh) -> Any:
    """The shapes and dtypes of a state, with the shardings on a mesh that its variables name."""
    shardings = nnx.get_named_sharding(state, mesh)
    named = jax.tree.leaves_with_path(state)
    for (path, leaf), sharding in zip(named, jax.tree.leaves(shardings), strict=True):
        try:
            sharding.shard_shape(leaf.shape)
        except ValueError:
            name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
            raise UserError(
                f"{name} of shape {leaf.shape} cannot be sharded as {sharding.spec} on a mesh of "
                f"{dict(mesh.shape)}: choose axes that divide it (a vocabulary may be padded)."
            ) from None
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        state,
        shardings,
    )


def _checked_mesh(config: Any, mesh: Mesh | None) -> Mesh:
    """The mesh to use, empty if there is none; raises if it cannot be that of a model."""
    if not isinstance(config, ModelConfig):
        raise TypeError(
            f"A model is made from a config, such as coat.models.Config, not from {config!r}. "
            "Published ones have names: coat.models.config_of('llama2_7b')."
        )
    mesh = jax.sharding.get_mesh() if mesh is None else mesh
    if mesh.empty and any(dataclasses.astuple(config.axes)):
        raise UserError(
            f"axes={config.axes} names axes of a mesh, and there is none. Pass mesh=, call this "
            "under jax.set_mesh(mesh), or leave axes at MeshAxes()."
        )
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise UserError(
            f"The axes of the mesh are {mesh.axis_types}, and must be automatic. Make it with "
            "jax.make_mesh(sizes, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))."
        )
    return mesh
