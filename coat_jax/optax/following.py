"""Which parameter a leaf of an optimizer's state belongs to: its path ends with the parameter's.

    params  ['layer']['w']          state  [0].mu['layer']['w']

Optimizers build their moments by mapping over the parameters, also where `optax.masked` or
`optax.partition` leave some out, so the path of a moment ends with the path of its parameter.
"""

from typing import Any

import jax
import optax


def followed_params(state: Any, params: optax.Params) -> list[Any]:
    """For each leaf of `state` the parameter that it follows, or None."""
    by_path = dict(jax.tree.leaves_with_path(optimized(params)))
    return [_longest_ending(path, by_path) for path, _ in jax.tree.leaves_with_path(state)]


def optimized(params: optax.Params) -> optax.Params:
    """The parameters that have gradients: with optax.lookahead, the fast copy."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def _longest_ending(path: tuple[Any, ...], by_path: dict[tuple[Any, ...], Any]) -> Any:
    endings = (path[start:] for start in range(len(path) + 1))
    return next((by_path[ending] for ending in endings if ending in by_path), None)
