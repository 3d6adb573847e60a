"""The trainer's optimizers do what the libraries' do, and skip in place."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from steps import assert_equal
from train_cases import small

import coat_jax as coat
from coat_jax import models
from coat_jax.errors import UserError
from coat_jax.training.config import OptimizerConfig
from coat_jax.training.optimizer import decay_mask, make_optimizer

NAMES = ("adamw", "fp8_adamw")
CONSTANT = {"schedule": "constant", "warmup_steps": 0, "learning_rate": 1e-2}


def tree(seed, dtype=jnp.float32):
    """A matrix that is large enough for FP8, in a tree that looks like a model's."""
    rng = np.random.default_rng(seed)
    shapes = {"embed": (128, 128), "norm": (128,)}
    return {
        name: jax.device_put(rng.standard_normal(s).astype(dtype)) for name, s in shapes.items()
    }


def test_adamw_is_that_of_optax_and_in_8_bits_nearly():
    """FP8 moments are within 2^-4 of FP32 ones, so steps of at most the rate are, too."""
    theirs = optax.adamw(1e-2, 0.9, 0.95, 1e-8, weight_decay=0.1, mask={"embed": 1, "norm": 0})
    wanted = tree(0)
    state = theirs.init(wanted)
    optimizers = [make_optimizer(small(optimizer={"name": name, **CONSTANT})) for name in NAMES]
    ours = [(tree(0), optimizer.init(tree(0))) for optimizer in optimizers]
    for i in range(1, 4):
        ours = [
            optimizer.step(params, tree(i), moments, grad_scale=0.5)
            for optimizer, (params, moments) in zip(optimizers, ours, strict=True)
        ]
        half = jax.tree.map(lambda g: g / 2, tree(i))
        updates, state = theirs.update(half, state, wanted)
        wanted = optax.apply_updates(wanted, updates)
    (exact, _), (in_8_bits, _) = ours
    for a, b, c in zip(*map(jax.tree.leaves, (exact, in_8_bits, wanted)), strict=True):
        np.testing.assert_allclose(a, c, rtol=1e-6)
        assert np.abs(b - c).max() < 3 * 1e-2 / 4
        assert np.abs(b - c).mean() < 1e-2 / 16


@pytest.mark.parametrize("name", NAMES)
def test_a_skipped_step_changes_no_bit(name):
    optimizer = make_optimizer(small(optimizer={"name": name}))
    before = tree(0, jnp.bfloat16)
    params, moments = optimizer.step(before, tree(1, jnp.bfloat16), optimizer.init(before))
    grads = tree(2, jnp.bfloat16)
    hostile = jax.tree.map(lambda g: g.at[0].set(jnp.nan).at[1].set(jnp.inf), grads)
    skipped = optimizer.step(params, hostile, moments, skip=jnp.bool_(True))
    assert_equal(skipped, (params, moments))
    taken = optimizer.step(params, grads, moments, skip=jnp.bool_(False))
    wanted = optimizer.step(params, grads, moments)
    assert_equal(taken, wanted)


def lion(rate):
    return coat.optax.compress(optax.lion(rate))


def test_a_transformation_steps_with_the_configs_schedule_or_with_its_own_rate():
    made = OptimizerConfig(transformation=lion, **CONSTANT)
    for settings, rate in ((made, 1e-2), (OptimizerConfig(transformation=lion(3e-2)), 3e-2)):
        optimizer = make_optimizer(dataclasses.replace(small(), optimizer=settings))
        params, moments = optimizer.step(tree(0), tree(1), optimizer.init(tree(0)))
        # A step of lion is the rate, whatever the gradient.
        moved = np.abs(params["embed"] - tree(0)["embed"])
        np.testing.assert_allclose(moved, rate, rtol=2e-2)
        assert moments.inner.codes[0].mu["embed"].dtype == coat.E4M3


def test_a_function_that_makes_no_transformation_is_refused():
    config = dataclasses.replace(small(), optimizer=lambda schedule: 3)
    with pytest.raises(UserError, match="transformation returns 3, which is not an optax"):
        make_optimizer(config)


@pytest.mark.parametrize(
    ("scan", "vectors", "embedding"), [(True, True, False), (False, False, True)]
)
def test_matrices_decay_and_the_config_decides_about_the_rest(scan, vectors, embedding):
    config = small(
        model={"scan": scan, "qkv_bias": True},
        optimizer={"decay_vectors": vectors, "decay_embedding": embedding},
    )
    _, params = models.abstract(config.model)
    found = {}
    for path, decays in jax.tree.leaves_with_path(decay_mask(config, params)):
        keys = [str(key.key) for key in path if hasattr(key, "key")]
        found[keys[0] if keys[0] != "layers" else keys[-1]] = decays
    matrices = ("query", "key", "value", "out", "gate", "up", "down", "head")
    wanted = dict.fromkeys(matrices, True) | {"embed": embedding}
    assert found == wanted | dict.fromkeys(
        ("scale", "norm", "query_bias", "key_bias", "value_bias"), vectors
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_decides_the_rounding_of_parameters_and_of_second_moments(name):
    """The updates are far below the last place of the parameters: some are rounded up.

    None is where parameters are rounded to nearest.
    """
    weights = np.linspace(0.51, 1.5, 128 * 256).astype(jnp.bfloat16).reshape(128, 256)
    params = {"embed": jax.device_put(weights)}
    noise = np.random.default_rng(0).standard_normal(weights.shape)
    grads = {"embed": jnp.asarray(noise, jnp.bfloat16)}
    settings = {"name": name, **CONSTANT, "learning_rate": 1e-4, "weight_decay": 0.0}

    def step(seed, **rounding):
        optimizer = make_optimizer(small(optimizer=settings | rounding, seed=seed))
        moved, moments = jax.jit(optimizer.step)(params, grads, optimizer.init(params))
        codes = [leaf for leaf in jax.tree.leaves(moments) if leaf.dtype == jnp.uint8]
        return moved["embed"], [leaf for leaf in codes if leaf.shape == weights.shape]

    (one, codes), (other, other_codes), (again, same_codes) = map(step, (0, 1, 0))
    assert np.mean(one != other) > 0.01
    np.testing.assert_array_equal(one, again)
    np.testing.assert_array_equal(codes, same_codes)
    np.testing.assert_array_equal(step(0, round_params="nearest")[0], weights)
    if name == "fp8_adamw":
        assert np.mean(codes[0] != other_codes[0]) > 0.1
