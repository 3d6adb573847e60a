"""The modules within a module, by their paths: "layers.3.attn.query"."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx

from coat_jax.errors import UserError


def children(
    module: Any, path: str = "", above: frozenset[int] = frozenset()
) -> Iterator[tuple[Any, str | int, str, nnx.Module]]:
    """Yields (owner, key, path, module) for every module within a module.

    The owner is the module or container that holds it, and the key its name or index there.
    Containers are lists, tuples, dicts, each `nnx.Pytree`, and every other class that is a node of
    JAX's trees, such as a `flax.struct.dataclass`.
    """
    above |= {id(module)}
    for key, value in _items(module):
        if id(value) in above:
            continue
        below = f"{path}.{key}" if path else str(key)
        if isinstance(value, nnx.Module) and not isinstance(value, nnx.List | nnx.Dict):
            yield module, key, below, value
        yield from children(value, below, above)


def replace_modules(model: nnx.Module, new: Callable[[str, nnx.Module], nnx.Module]) -> nnx.Module:
    """Returns a copy of `model` with `new(path, module)` in place of each module within it.

    A module with several paths is replaced once. Arrays are shared with `model`.
    """
    copy = nnx.merge(*nnx.split(model))
    done: dict[int, nnx.Module] = {}
    for owner, key, path, module in list(children(copy)):
        if id(module) not in done:
            done[id(module)] = new(path, module)
        if done[id(module)] is not module:
            _replace(owner, key, done[id(module)])
    return new("", copy)


def _replace(owner: Any, key: str | int, module: nnx.Module) -> None:
    is_mutable = isinstance(owner, nnx.Pytree | list | dict)
    if not is_mutable:
        kind, mutable = type(owner).__name__, "List" if isinstance(owner, tuple) else "Module"
        raise UserError(
            f"A {type(dict(_items(owner))[key]).__name__} is in a {kind}, in which no module can "
            f"be replaced: make the {kind} an nnx.{mutable}."
        )
    if isinstance(owner, nnx.Pytree) and isinstance(key, str):
        setattr(owner, key, module)
    else:
        owner[key] = module


def _items(node: Any) -> list[tuple[str | int, Any]]:
    """The elements of a module or container, by name or index; nothing for other values."""
    if isinstance(node, nnx.List | list | tuple):
        return list(enumerate(node))
    if isinstance(node, dict):
        return list(node.items())
    if isinstance(node, nnx.Pytree):
        return list(vars(node).items())
    if isinstance(node, nnx.Variable):
        return []
    one_level = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda inner: inner is not node)
    held = [(path[0], value) for path, value in one_level[0] if path]
    return [(jax.tree_util.keystr((key,), simple=True), value) for key, value in held]


def require_module(name: str, module: Any) -> None:
    """Raises unless the argument of the function `name` is a module."""
    if not isinstance(module, nnx.Module):
        raise TypeError(f"{name} takes a Flax NNX module, not {type(module).__name__}.")


def has_own_parameters(module: nnx.Module) -> bool:
    """Whether a module has parameters that are not those of a module within it."""
    return any(isinstance(value, nnx.Param) for value in vars(module).values())
