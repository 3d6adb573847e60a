"""The modules within a module, by their paths: "layers.3.attn.query"."""

from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx


def modules_of(
    module: Any, path: str = "", above: frozenset[int] = frozenset()
) -> Iterator[tuple[str, nnx.Module]]:
    """Yields (path, module) for a module, whose path is "", and for every module within it.

    A module with several paths comes once for each. Containers are lists, tuples, dicts, each
    `nnx.Pytree`, and every other class that is a node of JAX's trees, such as a
    `flax.struct.dataclass`.
    """
    if id(module) in above:
        return
    if isinstance(module, nnx.Module) and not isinstance(module, nnx.List | nnx.Dict):
        yield path, module
    for key, value in _items(module):
        yield from modules_of(value, f"{path}.{key}" if path else str(key), above | {id(module)})


def set_class(module: nnx.Module, kind: type[nnx.Module]) -> None:
    """Changes what a module computes, in whatever container it is; it keeps its attributes."""
    object.__setattr__(module, "__class__", kind)


def _items(node: Any) -> list[tuple[Any, Any]]:
    """The elements of a module or container, by name or index; nothing for other values."""
    if isinstance(node, nnx.List):
        return list(enumerate(node))
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
