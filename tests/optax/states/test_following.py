"""A leaf of a state belongs to the parameter that its path ends with, unless it is a setting."""

import jax
import jax.numpy as jnp
import optax

from coat_jax.optax.states.sharding import followed_indices


def test_counters_and_settings_follow_no_scalar_of_their_name():
    params = {"learning_rate": jnp.ones([]), "w": jnp.ones(4)}
    state = optax.inject_hyperparams(optax.adam)(1e-2).init(params)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(state)]
    indices = followed_indices(state, params)
    assert {path: i for path, i in zip(paths, indices, strict=True) if i is not None} == {
        ".inner_state[0].mu['learning_rate']": 0,
        ".inner_state[0].mu['w']": 1,
        ".inner_state[0].nu['learning_rate']": 0,
        ".inner_state[0].nu['w']": 1,
    }
