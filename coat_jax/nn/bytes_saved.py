"""The bytes that each module of a model saves for its backward pass, counted without running it.

An array that several modules save is counted once, for the first of them in the forward pass. A
module that contains others counts only the arrays that it computes between them.

The forward pass is traced with a scope named after each module. The backward pass inherits these
names, so the name of the operation that reads a saved array shows which module saved it.
"""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from coat_jax.nn.children import modules_of, require_module, set_class

SCOPE = re.compile(r"module_(\d+)_of_")

Saved = dict[str, list[Any]]  # the arrays that each module saves, as avals, by its path


def saved_bytes(module: nnx.Module, *inputs: Any) -> int:
    """How many bytes `module(*inputs)` saves for its backward pass, besides parameters.

    The module is only traced, it does not run. Compare a model, or one of its modules, before and
    after `convert`. Inputs may be arrays or `jax.ShapeDtypeStruct`.
    """
    require_module("saved_bytes", module)
    return sum(map(bytes_of, saved_by_module(module, *inputs).values()))


def bytes_of(arrays: list[Any], above: int = 0) -> int:
    """The bytes of arrays with more than `above` bytes per element."""
    return sum(a.size * a.dtype.itemsize for a in arrays if a.dtype.itemsize > above)


def saved_by_module(module: nnx.Module, *inputs: Any) -> Saved:
    """Returns what each module saves, by path, if it saves anything; "" is `module` itself."""
    graph, params, rest = nnx.split(module, nnx.Param, ...)
    weights = {shape for leaf in jax.tree.leaves(params) for shape in _shapes(leaf.shape)}
    paths = list(dict(modules_of(module)))
    found: Saved = {}

    def trace(params: Any, rest: Any, *inputs: Any) -> None:
        def forward(params: Any, *inputs: Any) -> list[Any]:
            model = _with_scopes(nnx.merge(graph, params, rest, copy=True), paths)
            outputs = jax.tree.leaves(model(*inputs))
            return [y for y in outputs if jnp.issubdtype(y.dtype, jnp.inexact)]

        y, pull = jax.vjp(forward, params, *inputs)
        backward = jax.make_jaxpr(lambda pull, dy: pull(dy))(pull, y).jaxpr
        leaves = jax.tree.leaves(pull)
        arrays = dict(zip(map(id, leaves), zip(leaves, backward.invars, strict=False), strict=True))
        for leaf, variable in arrays.values():
            if leaf.ndim and leaf.shape not in weights:
                found.setdefault(paths[_reader(backward, variable) or 0], []).append(variable.aval)

    jax.eval_shape(trace, params, rest, *inputs)
    return found


def _shapes(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The shapes of a parameter: its own, and those as a matrix, in which products read it."""
    splits = range(1, len(shape))
    return [shape, *((math.prod(shape[:i]), math.prod(shape[i:])) for i in splits)]


def _with_scopes(model: nnx.Module, paths: list[str]) -> Any:
    """`model`, whose modules open a scope when called; the index of their path is its name."""
    named: set[int] = set()
    for path, module in list(modules_of(model)):
        if id(module) not in named:  # a module with two paths is named after the first
            named.add(id(module))
            module._scope = f"module_{paths.index(path)}_of_"
            kind: Any = type(module)
            set_class(module, _with_scope(kind))
    return model


@functools.cache
def _with_scope(kind: Any) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(self._scope):
            return kind.__call__(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"__call__": call})


def _reader(jaxpr: Any, variable: Any) -> int | None:
    """The index of the module whose backward pass reads `variable`; None for the model itself."""
    # The last operation that reads it belongs to the module that comes first in the forward pass.
    for operation in reversed(jaxpr.eqns):
        positions = [i for i, read in enumerate(operation.invars) if read is variable]
        if not positions:
            continue
        for inner in _inner_jaxprs(operation):
            index = _reader(inner, inner.invars[positions[0]])
            if index is not None:
                return index
        scopes = SCOPE.findall(str(operation.source_info.name_stack))
        return int(scopes[-1]) if scopes else None
    return None


def _inner_jaxprs(operation: Any) -> list[Any]:
    """The jaxprs inside a jit, a scan or a recomputation that take its operands."""
    inner = [getattr(value, "jaxpr", value) for value in operation.params.values()]
    return [j for j in inner if len(getattr(j, "invars", ())) == len(operation.invars)]
