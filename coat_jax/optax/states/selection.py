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

from coat_jax.optax.states.sharding import followed_indices, optimized
from coat_jax.optax.trees import require_floats
from coat_jax.storage import Storage

# States that are subtracted from nearly equal numbers.
REFUSED = {optax.ScaleByLBFGSState: "L-BFGS", optax.ScaleByRStdDevState: "centered RMSProp"}
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
    leaves, structure = jax.tree.flatten(optimized(params))
    indices = followed_indices(state, params)
    # Integers without moments are left to the transformation.
    with_moments = [
        param if i in indices or jnp.iscomplexobj(param) else None for i, param in enumerate(leaves)
    ]
    require_floats(jax.tree.unflatten(structure, with_moments))
    shapes = [jnp.shape(param) for param in jax.tree.leaves(params)]
    chosen, unchosen = [], ""
    for (path, leaf), index, from_values, kind in zip(
        jax.tree.leaves_with_path(state),
        indices,
        depends_on_values(init, params),
        _kinds(state),
        strict=True,
    ):
        name, shape, dtype = jax.tree_util.keystr(path), jnp.shape(leaf), jnp.result_type(leaf)
        if kind in REFUSED:
            raise ValueError(
                f"compress does not take {REFUSED[kind]}, which subtracts nearly equal numbers: "
                "rounding to 8 bits is larger than their difference. Use it uncompressed."
            )
        if index is not None:
            if shape == jnp.shape(leaves[index]) and dtype.itemsize == 1 and dtype != jnp.bool_:
                raise ValueError(
                    f"The state of the wrapped transformation holds 8 bits already, in {name}. Use "
                    "fp8_adamw, or what is compressed, as it is."
                )
        elif len(shapes) > 1 and shape == (sum(map(math.prod, shapes)),):
            raise ValueError(
                f"The leaf {name} holds all parameters in one vector, as optax.flatten makes it. "
                "Compress inside it: optax.flatten(compress(tx))."
            )
        compressible = (
            index is not None
            and jnp.issubdtype(dtype, jnp.floating)
            and not from_values
            and kind not in WITHOUT_MOMENTS
            and math.prod(shape) > 0
            and storage.quantizes(shape)
        )
        chosen.append(compressible and (where is None or bool(where(name, leaf))))
        if compressible and not chosen[-1]:
            unchosen = unchosen or name
    if unchosen and not any(chosen):
        warnings.warn(
            "compress stores nothing in FP8: where(path, leaf) is false for all moments, the "
            f"first of which has the path {unchosen!r}.",
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


def _kinds(state: Any) -> list[type | None]:
    """For each leaf of `state`, which of the classes above it is part of, if any."""
    kinds = (*REFUSED, *WITHOUT_MOMENTS)
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kinds))
    return [
        next((kind for kind in kinds if isinstance(node, kind)), None)
        for node in nodes
        for _ in jax.tree.leaves(node)
    ]
