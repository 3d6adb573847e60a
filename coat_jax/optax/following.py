"""Which parameter a leaf of an optimizer's state belongs to: its path ends with the parameter's.

    params  ['layer']['w']          state  [0].mu['layer']['w']

Optimizers build their moments by mapping over the parameters, even where `optax.masked` or
`optax.partition` leave some out, so the path of a moment ends with the path of its parameter.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def followed_params(state: Any, params: optax.Params) -> list[Any]:
    """For each leaf of `state` the parameter that it follows, or None."""
    leaves = jax.tree.leaves(optimized(params))
    return [None if i is None else leaves[i] for i in followed_indices(state, params)]


def followed_indices(state: Any, params: optax.Params) -> list[int | None]:
    """For each leaf of `state` the index of the parameter that it follows, or None.

    A scalar never follows an array, even if its path ends like a parameter's: it may be a counter.
    """
    named = jax.tree.leaves_with_path(optimized(params))
    by_path = {path: index for index, (path, _) in enumerate(named)}

    def followed(path: tuple[Any, ...], leaf: Any) -> int | None:
        """The parameter whose path is the longest ending of `path`."""
        endings = (path[start:] for start in range(len(path) + 1))
        index = next((by_path[ending] for ending in endings if ending in by_path), None)
        if index is not None and jnp.ndim(leaf) == 0 and jnp.ndim(named[index][1]) > 0:
            return None
        return index

    return [followed(path, leaf) for path, leaf in jax.tree.leaves_with_path(state)]


def optimized(params: optax.Params) -> optax.Params:
    """The parameters that have gradients: with optax.lookahead, the fast copy."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params
