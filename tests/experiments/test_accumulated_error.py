"""The ways to store Adam's moments whose errors accumulated_error compares."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import coat_jax as coat
from coat_jax.kernels.adam import Hyper
from coat_jax.numerics import noise
from coat_jax.numerics.formats import E4M3
from coat_jax.storage import Storage
from experiments.accumulated_error import storages
from experiments.moments import stored
from experiments.moments.stored import scale_by_stored_adam

B2 = 0.95
HYPER = Hyper(b2=B2)
SHAPE = (128, 128)
OURS, EXPANDED = Storage(), Storage(first=E4M3, second=E4M3)
KEY = noise.leaf_key(0, 1, 0)


def moments() -> tuple[jax.Array, jax.Array]:
    """An m and a v such as a training has, with directions of similar size."""
    sizes, directions = jax.random.normal(jax.random.key(0), (2, *SHAPE))
    v = jnp.exp(2 * sizes)
    return directions * jnp.sqrt(v), v


def followed(tx, steps: int = 3) -> list[np.ndarray]:
    """The updates of a few steps on gradients whose elements differ in size."""
    grads = jax.random.normal(jax.random.key(1), (steps, *SHAPE)) * jnp.sqrt(moments()[1])
    state, updates = tx.init({"w": grads[0]}), []
    step = jax.jit(tx.update)
    for grad in grads:
        update, state = step({"w": grad}, state)
        updates.append(np.asarray(update["w"]))
    return updates


@pytest.mark.parametrize("storage", [OURS, EXPANDED])
def test_both_moments_are_stored_as_coat_jax_stores_them(storage):
    storage = dataclasses.replace(storage, stochastic=False)
    found = followed(scale_by_stored_adam(HYPER, stored.both(storage, HYPER)))
    expected = followed(coat.optax.scale_by_fp8_adam(b2=B2, storage=storage))
    # The same operations in two programs: a code that differed would move an update by a percent.
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("storage", [OURS, EXPANDED])
def test_the_other_moment_stays_in_fp32(storage):
    m, v = moments()
    first = stored.first_alone(storage, HYPER)(m, v, KEY)
    np.testing.assert_array_equal(first.v, v)
    assert first.smallest_v == 0.0
    second = stored.second_alone(storage, HYPER)(m, v, KEY)
    np.testing.assert_array_equal(second.m, m)
    both = stored.both(storage, HYPER)(m, v, KEY)
    np.testing.assert_array_equal(second.v, both.v)
    for exact, read in ((m, first.m), (v, second.v)):
        error = np.abs(read - exact)
        assert np.mean(error > 0) > 0.8
        assert np.sum(error**2) < 0.01 * np.sum(exact**2)


def test_a_direction_alone_is_over_the_root_of_the_exact_second_moment():
    m, v = moments()
    read = stored.first_alone(OURS, HYPER)(m, v, KEY).m
    codes = np.asarray(read / jnp.sqrt(v))
    exact = np.asarray(m / jnp.sqrt(v))
    scale = np.abs(exact).max(axis=1, keepdims=True) / 127
    np.testing.assert_allclose(codes / scale, np.round(codes / scale), atol=1e-3)
    # Large codes are rounded to nearest, small ones up or down.
    error = np.abs(codes - exact) / scale
    assert error.max() < 1
    assert error[np.abs(exact) > 20 * scale].max() < 0.5 + 1e-3


def test_codes_of_flash_optim_are_companded_in_groups_of_32():
    m, v = moments()
    read = stored.flash_optim(stochastic=False)(m, v, KEY)
    for exact, found, image, steps in (
        (m, read.m, lambda x: 2 * x / (1 + np.abs(x)), 127),
        (jnp.sqrt(v), jnp.sqrt(read.v), lambda x: x, 255),
    ):
        before, after = (np.asarray(x).reshape(128, 4, 32) for x in (exact, found))
        scale = np.float32(np.float16(np.abs(before).max(axis=-1, keepdims=True)))
        codes = steps * image(after / scale)
        np.testing.assert_allclose(codes, np.round(codes), atol=1e-3)
        # Half a code; and what the rounding of the scale, by at most 2^-11, moves it.
        assert np.abs(codes - steps * image(before / scale)).max() < 0.5 + steps * 2**-11 + 1e-3


def test_the_second_moment_of_flash_optim_may_be_right_on_average():
    v = jnp.broadcast_to(moments()[1][:1], (2048, 128))
    read = stored.flash_optim(stochastic=True)(jnp.zeros_like(v), v, KEY).v
    exact, found = np.sqrt(np.asarray(v[0])), np.sqrt(np.asarray(read))
    step = np.abs(exact).reshape(4, 32).max(axis=-1).repeat(32) / 255
    # The rounding of the scale to FP16, and 5 standard errors of the mean.
    assert (np.abs(found.mean(axis=0) - exact) <= exact * 2**-11 + step * 5 / 2 / 2048**0.5).all()


def test_every_storage_follows_adam():
    exact = np.asarray(followed(optax.scale_by_adam(b2=B2)))
    for name, optimizer in storages(B2).items():
        error = np.asarray(followed(optimizer)) - exact
        assert 0 < np.sum(error**2) < 0.05 * np.sum(exact**2), name
