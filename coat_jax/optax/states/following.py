"""Which parameter a leaf of an optimizer's state belongs to: its path ends with the parameter's.

    params  ['layer']['w']          state  [0].mu['layer']['w']

Optimizers build their moments by mapping over the parameters, even where `optax.masked` or
`optax.partition` leave some out, so the path of a moment ends with the path of its parameter.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from coat_jax.optax.masks import is_left_out


def param_of_leaf(state: Any, params: optax.Params) -> list[Any]:
    """For each leaf of `state` the parameter that it follows, or None."""
    leaves = jax.tree.leaves(optimized(params))
    return [None if i is None else leaves[i] for i in followed_indices(state, params)]


def followed_indices(state: Any, params: optax.Params) -> list[int | None]:
    """For each leaf of `state` the index of the parameter that it follows, or None.

    A scalar whose path ends like a parameter's may be a counter or a setting. It never follows an
    array; and it follows one of several parameters only if the same subtree has leaves for others.
    """
    named = jax.tree.leaves_with_path(optimized(params))
    by_path = {path: index for index, (path, _) in enumerate(named)}
    paths = {path for path, _ in jax.tree.leaves_with_path(state, is_leaf=is_left_out)}

    def followed(path: tuple[Any, ...], leaf: Any) -> int | None:
        """The parameter whose path is the longest ending of `path`."""
        starts = (start for start in range(len(path) + 1) if path[start:] in by_path)
        start = next(starts, None)
        if start is None:
            return None
        index = by_path[path[start:]]
        if jnp.ndim(leaf) == 0:
            beside = (path[:start] + other for other, _ in named if other != path[start:])
            alone = len(named) > 1 and paths.isdisjoint(beside)
            if alone or jnp.ndim(named[index][1]) > 0:
                return None
        return index

    return [followed(path, leaf) for path, leaf in jax.tree.leaves_with_path(state)]


def optimized(params: optax.Params) -> optax.Params:
    """The parameters that have gradients: with optax.lookahead, the fast copy."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params
