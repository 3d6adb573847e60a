"""A leaf of a state belongs to the parameter that its path ends with, unless it is a setting."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import coat_jax as coat
from coat_jax.optax.states.following import followed_indices


class Net(NamedTuple):
    """Has a scalar parameter with the name of optax's counters."""

    w: jax.Array
    count: jax.Array


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


def test_a_step_by_stages_updates_a_scalar_of_a_counter_s_name():
    optimizer = coat.optax.in_place(optax.adam(1e-2))
    stages = [
        coat.optax.Stage(lambda net: net.w, lambda w, _: jnp.sum(w)),
        coat.optax.Stage(lambda net: net.count, lambda count, x: count * x),
    ]
    net = Net(jnp.ones(64), jnp.float32(1))
    done = coat.optax.step_by_stages(optimizer, stages, net, optimizer.init(net))
    grads = Net(jnp.ones(64), jnp.float32(64))
    wanted, _ = optimizer.step(net, grads, optimizer.init(net))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), done.params, wanted)
