"""The modules within a module, by their paths: "layers.3.attn.query"."""

from collections.abc import Iterator
from typing import Any

from flax import nnx

from coat_jax.errors import UserError


def children(
    module: Any, path: str = "", above: frozenset[int] = frozenset()
) -> Iterator[tuple[Any, str | int, str, nnx.Module]]:
    """Yields (owner, key, path, module) for every module within a module.

    The owner is the module, list, tuple or dict that holds it, and the key its name or index there.
    """
    items: list[tuple[str | int, Any]]
    if isinstance(module, nnx.List | list | tuple):
        items = list(enumerate(module))
    elif isinstance(module, dict):
        items = list(module.items())
    else:
        items = list(vars(module).items())
    above |= {id(module)}
    for key, value in items:
        if not isinstance(value, nnx.Module | list | tuple | dict) or id(value) in above:
            continue
        below = f"{path}.{key}" if path else str(key)
        if isinstance(value, nnx.Module) and not isinstance(value, nnx.List | nnx.Dict):
            yield module, key, below, value
        yield from children(value, below, above)


def replace(owner: Any, key: str | int, module: nnx.Module) -> None:
    """Puts a module in the place of another one, whose owner and key `children` returned."""
    if isinstance(owner, tuple):
        raise UserError(
            f"A {type(owner[int(key)]).__name__} stands in a tuple, in which no module can be "
            "replaced: make the tuple an nnx.List."
        )
    if isinstance(owner, nnx.Module) and isinstance(key, str):
        setattr(owner, key, module)
    else:
        owner[key] = module


def require_module(name: str, module: Any) -> None:
    """Raises unless the argument of the function `name` is a module."""
    if not isinstance(module, nnx.Module):
        raise TypeError(f"{name} takes a Flax NNX module, not {type(module).__name__}.")


def has_own_parameters(module: nnx.Module) -> bool:
    """Whether a module has parameters that are not those of a module within it."""
    return any(isinstance(value, nnx.Param) for value in vars(module).values())
