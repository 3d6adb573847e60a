"""The run's seed decides the first parameters, the order of the data and all rounding.

Each is seen alone: two seeds give two results, and one seed always the same.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from train_cases import small

from coat_jax.training.cluster.batches import open_data
from coat_jax.training.cluster.mesh import make_mesh
from coat_jax.training.optimizer import make_optimizer
from coat_jax.training.state import new_state

SEEDS = (0, 1, 0)


def config_of(seed, **changes):
    return small(model={"layers": 1, "param_dtype": "bfloat16"}, seed=seed, **changes)


def mesh_of(config):
    return make_mesh(config.mesh, jax.devices()[:1])


def differences(first, second):
    """By leaf: the share of elements that are not the same."""
    leaves = zip(*map(jax.tree.leaves, (first, second)), strict=True)
    return [float(np.mean(np.asarray(a) != np.asarray(b))) for a, b in leaves]


def test_first_parameters():
    def parameters(seed):
        config = config_of(seed)
        mesh = mesh_of(config)
        with jax.set_mesh(mesh):
            return new_state(config, make_optimizer(config), mesh).params

    one, other, again = map(parameters, SEEDS)
    constant = [
        bool(np.all(leaf == leaf.flat[0])) for leaf in map(np.asarray, jax.tree.leaves(one))
    ]
    shares = zip(differences(one, other), constant, strict=True)
    drawn = [share for share, scale_of_a_norm in shares if not scale_of_a_norm]
    assert len(drawn) >= 5
    assert min(drawn) > 0.5
    assert not any(differences(one, again))


def test_the_order_of_the_data():
    def batches(seed):
        config = config_of(seed)
        data = open_data(config, mesh_of(config), "train")
        found = [next(data).tokens for _ in range(2)]
        data.close()
        return found

    one, other, again = map(batches, SEEDS)
    assert all(share > 0.5 for share in differences(one, other))
    assert not any(differences(one, again))


def test_held_out_batches_are_those_of_every_seed():
    def batch(seed):
        config = config_of(seed)
        data = open_data(config, mesh_of(config), "held_out")
        first = next(data)
        data.close()
        return first

    assert not any(differences(batch(0), batch(1)))


PARAMS = {
    "w": jax.device_put(np.linspace(0.5, 1.5, 128 * 256).astype(jnp.bfloat16).reshape(128, 256))
}


@pytest.mark.parametrize("name", ["fp8_adamw", "adamw"])
def test_the_rounding_of_parameters(name):
    """The updates are far below the last place of the parameters: some are rounded up."""

    def step(seed):
        config = config_of(seed, optimizer={"name": name, "learning_rate": 1e-4, "warmup_steps": 0})
        optimizer = make_optimizer(config)
        grads = jax.tree.map(jnp.ones_like, PARAMS)
        return jax.jit(optimizer.step)(PARAMS, grads, optimizer.init(PARAMS))[0]

    one, other, again = map(step, SEEDS)
    assert all(share > 0.01 for share in differences(one, other))
    assert not any(differences(one, again))


def test_the_rounding_of_second_moments():
    def step(seed):
        optimizer = make_optimizer(config_of(seed))
        noise = np.random.default_rng(0).standard_normal(PARAMS["w"].shape)
        grads = {"w": jnp.asarray(noise, jnp.bfloat16)}
        moments = optimizer.init(PARAMS)
        _, moments = jax.jit(optimizer.step)(PARAMS, grads, moments)
        return [
            leaf
            for leaf in jax.tree.leaves(moments)
            if leaf.dtype == jnp.uint8 and leaf.shape == PARAMS["w"].shape
        ]

    one, other, again = map(step, SEEDS)
    assert max(differences(one, other)) > 0.1
    assert not any(differences(one, again))
