"""The trainer's optimizers do what the libraries' do, and skip in place."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from train_cases import ONE, mesh_of, small

import coat_jax as coat
from coat_jax import models
from coat_jax.errors import UserError
from coat_jax.training.config import OptimizerConfig
from coat_jax.training.optimizer import decayed, make_optimizer
from coat_jax.training.preparation import prepare

NAMES = ("adamw", "fp8_adamw")
CONSTANT = {"schedule": "constant", "warmup_steps": 0, "learning_rate": 1e-2}


def tree(seed, dtype=jnp.float32):
    """A matrix that is large enough for FP8, in a tree that looks like a model's."""
    rng = np.random.default_rng(seed)
    shapes = {"embed": (128, 128), "norm": (128,)}
    return {
        name: jax.device_put(rng.standard_normal(s).astype(dtype)) for name, s in shapes.items()
    }


def test_adamw_is_that_of_optax():
    optimizer = make_optimizer(small(optimizer={"name": "adamw", **CONSTANT}))
    mask = {"embed": True, "norm": False}
    theirs = optax.adamw(1e-2, 0.9, 0.95, 1e-8, weight_decay=0.1, mask=mask)
    params, wanted = tree(0), tree(0)
    moments, state = optimizer.init(params), theirs.init(wanted)
    for i in range(1, 4):
        params, moments = optimizer.step(params, tree(i), moments, grad_scale=0.5)
        half = jax.tree.map(lambda g: g / 2, tree(i))
        updates, state = theirs.update(half, state, wanted)
        wanted = optax.apply_updates(wanted, updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), params, wanted)


def test_both_step_alike():
    """FP8 moments are within 2^-4 of FP32 ones, so steps of at most the rate are, too."""
    params = {}
    for name in NAMES:
        optimizer = make_optimizer(small(optimizer={"name": name, **CONSTANT}))
        params[name], moments = tree(0), optimizer.init(tree(0))
        for i in range(1, 4):
            params[name], moments = optimizer.step(params[name], tree(i), moments)
    for a, b in zip(*map(jax.tree.leaves, params.values()), strict=True):
        assert np.abs(a - b).max() < 3 * 1e-2 / 4
        assert np.abs(a - b).mean() < 1e-2 / 16


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_skipped_step_changes_no_bit(name, dtype):
    optimizer = make_optimizer(small(optimizer={"name": name}))
    params = tree(0, dtype)
    params, moments = optimizer.step(params, tree(1, dtype), optimizer.init(params))
    hostile = jax.tree.map(lambda g: g.at[0].set(jnp.nan).at[1].set(jnp.inf), tree(2, dtype))
    skipped = optimizer.step(params, hostile, moments, skip=jnp.bool_(True))
    for a, b in zip(*map(jax.tree.leaves, (skipped, (params, moments))), strict=True):
        np.testing.assert_array_equal(a, b)
    taken = optimizer.step(params, tree(2, dtype), moments, skip=jnp.bool_(False))
    wanted = optimizer.step(params, tree(2, dtype), moments)
    for a, b in zip(*map(jax.tree.leaves, (taken, wanted)), strict=True):
        np.testing.assert_array_equal(a, b)


def lion(rate):
    return coat.optax.compress(optax.lion(rate))


@pytest.mark.parametrize(
    ("settings", "rate"),
    [
        (
            OptimizerConfig(
                transformation=lion, schedule="constant", warmup_steps=0, learning_rate=1e-2
            ),
            1e-2,
        ),
        (OptimizerConfig(transformation=lion(3e-2)), 3e-2),
    ],
    ids=["made from the schedule", "ready"],
)
def test_a_transformation_steps_with_the_configs_schedule_or_with_its_own_rate(settings, rate):
    optimizer = make_optimizer(dataclasses.replace(small(), optimizer=settings))
    params, moments = optimizer.step(tree(0), tree(1), optimizer.init(tree(0)))
    # A step of lion is the rate, whatever the gradient.
    moved = np.abs(params["embed"] - tree(0)["embed"])
    np.testing.assert_allclose(moved, rate, rtol=2e-2)
    assert moments.inner.codes[0].mu["embed"].dtype == coat.E4M3


def test_a_function_that_makes_no_transformation_is_refused():
    config = dataclasses.replace(small(), optimizer=lambda schedule: 3)
    with pytest.raises(UserError, match=r"transformation returns 3, which is not an optax"):
        make_optimizer(config)


def test_a_function_that_fails_is_named():
    config = dataclasses.replace(small(), optimizer=lambda schedule: optax.adam(schedule, nope=3))
    with pytest.raises(UserError, match=r"transformation=.*<lambda> fails: TypeError: .*'nope'"):
        make_optimizer(config)


def test_a_class_of_transformations_is_no_transformation():
    class Mine:
        def init(self, params): ...

        def update(self, grads, state, params=None): ...

    with pytest.raises(UserError, match="is neither an optax transformation"):
        OptimizerConfig(transformation=Mine)


@pytest.mark.parametrize(
    ("needing_more", "what"),
    [
        (optax.lbfgs(), "'value', 'grad', and 'value_fn'"),
        (lambda schedule: optax.chain(optax.adam(schedule), optax.lbfgs()), "'value_fn'"),
        (optax.contrib.reduce_on_plateau(), "'value'"),
    ],
)
def test_a_transformation_that_needs_more_than_gradients_is_refused(needing_more, what):
    config = dataclasses.replace(small(), optimizer=needing_more)
    with pytest.raises(UserError, match=rf"needs .*{what}, and the trainer passes gradients"):
        prepare(config, mesh_of(ONE))


def test_another_mistake_of_a_transformation_shows_as_it_is():
    broken = optax.GradientTransformation(optax.identity().init, lambda g, s, p=None: 1 + "a")
    with pytest.raises(TypeError, match="unsupported operand"):
        prepare(dataclasses.replace(small(), optimizer=broken), mesh_of(ONE))


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("vectors", [True, False])
@pytest.mark.parametrize("embedding", [True, False])
def test_matrices_decay_and_the_config_decides_about_the_rest(scan, vectors, embedding):
    config = small(
        model={"scan": scan, "qkv_bias": True},
        optimizer={"decay_vectors": vectors, "decay_embedding": embedding},
    )
    _, params = models.abstract(config.model)
    found = {}
    for path, decays in jax.tree.leaves_with_path(decayed(config, params)):
        keys = [str(key.key) for key in path if hasattr(key, "key")]
        found[keys[0] if keys[0] != "layers" else keys[-1]] = decays
    matrices = ("query", "key", "value", "out", "gate", "up", "down", "head")
    wanted = dict.fromkeys(matrices, True) | {"embed": embedding}
    assert found == wanted | dict.fromkeys(
        ("scale", "norm", "query_bias", "key_bias", "value_bias"), vectors
    )
