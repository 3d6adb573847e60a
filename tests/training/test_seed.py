"""The run's seed decides the first parameters, the order of the data and all rounding.

Each is seen alone: two seeds give two results, and one seed always the same.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from train_cases import ONE, mesh_of, small

from coat_jax.training.cluster.batches import open_data
from coat_jax.training.optimizer import make_optimizer
from coat_jax.training.setup import prepare

SEEDS = (0, 1, 0)


def config_of(seed, **changes):
    return small(model={"layers": 1, "param_dtype": "bfloat16"}, seed=seed, **changes)


def differences(first, second):
    """By leaf: the share of elements that are not the same."""
    leaves = zip(*map(jax.tree.leaves, (first, second)), strict=True)
    return [float(np.mean(np.asarray(a) != np.asarray(b))) for a, b in leaves]


def test_first_parameters():
    one, other, again = (
        prepare(config_of(seed), mesh_of(ONE)).new_state().params for seed in SEEDS
    )
    drawn = [np.ptp(np.float32(leaf)) > 0 for leaf in jax.tree.leaves(one)]  # no scales of norms
    assert sum(drawn) >= 5
    differ = zip(differences(one, other), drawn, strict=True)
    assert all(share > 0.5 for share, random in differ if random)
    assert not any(differences(one, again))


def test_the_order_of_the_data_and_not_what_is_held_out():
    def tokens(seed, split):
        data = open_data(config_of(seed), mesh_of(ONE), split)
        found = [next(data).tokens for _ in range(2)]
        data.close()
        return found

    one, other, again = (tokens(seed, "train") for seed in SEEDS)
    assert all(share > 0.5 for share in differences(one, other))
    assert not any(differences(one, again))
    assert not any(differences(tokens(0, "held_out"), tokens(1, "held_out")))


@pytest.mark.parametrize("name", ["fp8_adamw", "adamw"])
def test_the_rounding_of_parameters_and_of_second_moments(name):
    """The updates are far below the last place of the parameters: some are rounded up.

    None is where parameters are rounded to nearest.
    """
    weights = np.linspace(0.51, 1.5, 128 * 256).astype(jnp.bfloat16).reshape(128, 256)
    params = {"w": jax.device_put(weights)}
    noise = np.random.default_rng(0).standard_normal(weights.shape)
    grads = {"w": jnp.asarray(noise, jnp.bfloat16)}

    def step(seed, **rounding):
        settings = {"name": name, "learning_rate": 1e-4, "warmup_steps": 0, "weight_decay": 0.0}
        optimizer = make_optimizer(config_of(seed, optimizer=settings | rounding))
        moved, moments = jax.jit(optimizer.step)(params, grads, optimizer.init(params))
        codes = [leaf for leaf in jax.tree.leaves(moments) if leaf.dtype == jnp.uint8]
        return moved, [leaf for leaf in codes if leaf.shape == weights.shape]

    one, other, again = map(step, SEEDS)
    assert all(share > 0.01 for share in differences(one[0], other[0]))
    assert not any(differences(one, again))
    assert not any(differences(step(0, round_stochastically=False)[0], params))
    if name == "fp8_adamw":
        assert max(differences(one[1], other[1])) > 0.1
