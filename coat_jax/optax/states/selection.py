"""Which leaves of an optimizer's state `compress` stores in FP8.

A moment is a leaf that
    follows a parameter (its path ends with the parameter's),
    is a float in at least 16 bits, and large enough by the rule of `Storage`,
    is not meant for the user to read, like the gradient of a line search,
    is not initialized with the parameter's values, or with anything computed from them,
    and is accepted by the user's `where`.

Copies of parameters (of `optax.contrib.schedule_free`, `mechanize`, `prodigy`, `dog`) lose too
much in 8 bits: an update is smaller than the distance between two codes. They are recognized in
the jaxpr of `init`, not by their values, so that neither parameters that begin at zero nor a
traced `init` change the result.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import optax

from coat_jax.numerics.expansion import Expanded
from coat_jax.optax.checks.trees import dtype_of, is_fp8, require_real_float
from coat_jax.optax.states.following import optimized, param_of_leaf
from coat_jax.storage import Storage

# States that are subtracted from nearly equal numbers, with their descriptions for the error.
REFUSED = {
    optax.ScaleByLBFGSState: "L-BFGS, which subtracts the last gradients and parameters from the "
    "present ones",
    optax.ScaleByRStdDevState: "scale_by_stddev and rmsprop(centered=True), which subtract the "
    "squared mean from the mean square",
}
# States for users to read: the last gradient, a measurement.
WITHOUT_MOMENTS = (
    optax.ScaleByBacktrackingLinesearchState,
    optax.ScaleByZoomLinesearchState,
    optax.transforms.MonitorState,
    optax.transforms.SnapshotState,
)


# Equations that call another program with their own inputs and outputs, one for one.
CALLS = {"jit", "pjit", "closed_call", "core_call", "remat", "checkpoint", "custom_jvp_call"}


def select_moments(
    init: Callable[[Any], Any],
    state: Any,
    params: optax.Params,
    storage: Storage,
    where: Callable[[str, Any], bool] | None,
) -> list[bool]:
    """For each leaf of `state`, which is `init(params)`, whether it is compressed."""
    _require_compressible(state)
    for path, param in jax.tree.leaves_with_path(params):
        if jnp.iscomplexobj(param):
            require_real_float(jax.tree_util.keystr(path), param)
    chosen, refused = [], []
    for (path, leaf), param, from_values, read in zip(
        jax.tree.leaves_with_path(state),
        param_of_leaf(state, params),
        depends_on_values(init, params),
        _within(WITHOUT_MOMENTS, state),
        strict=True,
    ):
        name = jax.tree_util.keystr(path)
        if param is None:
            _require_not_flat(path, leaf, params)
        else:
            require_real_float(f"The parameter of {name}", param)
        compressible = (
            param is not None
            and _is_wide_float(leaf)
            and not (from_values or read)
            and jnp.size(leaf) > 0
            and storage.quantizes(jnp.shape(leaf))
        )
        chosen.append(compressible and (where is None or bool(where(name, leaf))))
        if compressible and not chosen[-1]:
            refused.append(name)
    if refused and not any(chosen):
        warnings.warn(
            "compress stores nothing in FP8: where(path, leaf) is false for all moments, the "
            f"first of which has the path {refused[0]!r}.",
            stacklevel=2,
        )
    return chosen


def depends_on_values(f: Callable[[Any], Any], x: Any) -> list[bool]:
    """For each leaf of f(x), whether it is computed from the values in x, not only their shapes."""
    program = jax.make_jaxpr(f)(x)
    return _dependent_outputs(program.jaxpr, [True] * len(program.jaxpr.invars))


def without_names(tree: Any, params: optax.Params) -> Any:
    """`tree` with tuples for all its containers, down to those that the parameters are in."""
    params = optimized(params)
    param_paths = {path for path, _ in jax.tree.leaves_with_path(params)}

    def is_like_params(node: Any) -> bool:
        paths = [path for path, _ in jax.tree.leaves_with_path(node)]
        if not param_paths:  # optax.tree_map_params passes a placeholder without leaves.
            return not paths and type(node) is type(params)
        return bool(paths) and param_paths.issuperset(paths)

    def strip(node: Any) -> Any:
        if jax.tree_util.all_leaves([node]) or is_like_params(node):
            return node
        return tuple(map(strip, jax.tree.leaves(node, is_leaf=lambda child: child is not node)))

    return strip(tree)


def _is_wide_float(leaf: Any) -> bool:
    dtype = dtype_of(leaf)
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize >= 2


def _dependent_outputs(jaxpr: Any, dependent_inputs: Sequence[bool]) -> list[bool]:
    dependent = {var for var, is_so in zip(jaxpr.invars, dependent_inputs, strict=True) if is_so}

    def is_dependent(atom: Any) -> bool:
        return not isinstance(atom, jax.extend.core.Literal) and atom in dependent

    for eqn in jaxpr.eqns:
        inputs = [is_dependent(atom) for atom in eqn.invars]
        called = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
        called = getattr(called, "jaxpr", called)
        if called is not None and eqn.primitive.name in CALLS and any(inputs):
            outputs = _dependent_outputs(called, inputs)
        else:
            outputs = [any(inputs)] * len(eqn.outvars)
        dependent |= {var for var, is_so in zip(eqn.outvars, outputs, strict=True) if is_so}
    return [is_dependent(atom) for atom in jaxpr.outvars]


def _within(types: tuple[type, ...], state: Any) -> list[bool]:
    """For each leaf of `state`, whether it is part of a node of these types."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, types))
    return [isinstance(node, types) for node in nodes for _ in jax.tree.leaves(node)]


def _within_codes(state: Any) -> list[bool]:
    """For each leaf of `state`, whether it is part of arrays that are stored in 8 bits."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, Expanded))
    return [
        isinstance(node, Expanded)
        and any(dtype_of(codes).itemsize == 1 for codes in jax.tree.leaves(node.codes))
        for node in nodes
        for _ in jax.tree.leaves(node)
    ]


def _require_compressible(state: Any) -> None:
    leaves = jax.tree.leaves_with_path(state)
    for (path, leaf), coded in zip(leaves, _within_codes(state), strict=True):
        if is_fp8(leaf) or coded:
            raise ValueError(
                f"The state of the wrapped transformation holds codes of 8 bits already, in "
                f"{jax.tree_util.keystr(path)}. Nothing is gained by storing it twice: use "
                "fp8_adamw, or what is compressed, as it is."
            )
    for refused, description in REFUSED.items():
        if any(_within((refused,), state)):
            raise ValueError(
                f"compress does not take {description}: rounding to 8 bits is larger than the "
                "difference. Use it uncompressed."
            )


def _require_not_flat(path: tuple[Any, ...], leaf: Any, params: optax.Params) -> None:
    """Raises for one vector of all parameters, which the rule for moments does not see."""
    named = jax.tree.leaves_with_path(params)
    total = sum(math.prod(jnp.shape(p)) for _, p in named)
    if jnp.shape(leaf) != (total,) or not _is_wide_float(leaf):
        return
    # The leaves of SM3 have a parameter's path within their own.
    if not any(_contains(path, of_param) for of_param, _ in named):
        raise ValueError(
            f"The leaf {jax.tree_util.keystr(path)} holds all parameters in one vector, as "
            "optax.flatten makes it. Compress inside it: optax.flatten(compress(tx))."
        )


def _contains(path: tuple[Any, ...], part: tuple[Any, ...]) -> bool:
    """Whether `part` is a piece of `path`."""
    starts = range(len(path) - len(part) + 1)
    return any(path[start : start + len(part)] == part for start in starts)
