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
from experiments.accumulated_error import STORAGES, Lead, leads
from experiments.moments import stored
from experiments.moments.stored import scale_by_stored_adam

B2 = 0.95
HYPER = Hyper(b2=B2)
SHAPE = (128, 128)
OURS, EXPANDED = Storage(), Storage(first=E4M3, second=E4M3)
KEY = noise.leaf_key(0, 1, 0)


@pytest.fixture(scope="module")
def of_leads() -> dict[str, Lead]:
    return leads(B2)


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


@pytest.mark.parametrize("storage", [OURS, EXPANDED])
def test_all_codes_of_the_first_moment_may_be_stochastic(storage):
    # A constant v is exact, so errors are of m alone. These m have large codes in both formats.
    m, v = jnp.linspace(0.51, 1.0, 128)[None].repeat(128, axis=0), jnp.ones(SHAPE)

    def share_of_random(store: stored.Store) -> float:
        read = np.asarray(store(m, v, KEY).m)[:, 102:-1]  # from 0.9 on; the largest is exact
        return np.mean(np.ptp(read, axis=0) > 0)

    assert share_of_random(stored.both(storage, HYPER)) == 0
    assert share_of_random(stored.first_stochastic(storage, HYPER)) > 0.9


def test_the_root_of_the_second_moment_is_right_on_average():
    m, v = moments()
    one = jnp.broadcast_to(v[:1], (2048, 128))
    read = stored.root_of_second(EXPANDED, HYPER)(jnp.zeros_like(one), one, KEY)
    exact, found = np.sqrt(np.asarray(v[0])), np.sqrt(np.asarray(read.v))
    # A step of E4M3 is at most an eighth of the root; the mean of 2048 has 5 standard errors.
    np.testing.assert_allclose(found.mean(axis=0), exact, rtol=5 / 8 / 2 / 2048**0.5)
    assert np.mean(found.std(axis=0) > 0) > 0.9
    of_m = stored.root_of_second(EXPANDED, HYPER)(m, v, KEY).m
    np.testing.assert_array_equal(of_m, stored.both(EXPANDED, HYPER)(m, v, KEY).m)


def test_the_root_of_the_second_moment_is_stored_over_twice_as_many_binades():
    # Expanded FP8 has about 36 binades: enough for the root of 2^-50, but not for 2^-50.
    v = jnp.full(SHAPE, 2.0**-50).at[:, 0].set(1.0)
    read = stored.root_of_second(EXPANDED, HYPER)(jnp.zeros_like(v), v, KEY)
    # The smallest image is 4 codes; it becomes 3 to 5, to a power of at most 2 for the root.
    assert (read.v >= v * 0.75**4).all()
    assert (read.v <= v * 1.25**4).all()
    assert np.mean(stored.both(EXPANDED, HYPER)(v, v, KEY).v == 0) > 0.9


def test_with_sixteenths_an_expanded_moment_is_as_coat_jax_stores_it():
    m, v = moments()
    ours = stored.both(EXPANDED, HYPER)(m, v, KEY)
    for of_all, read in zip(ours, stored.expanded_with_exponent(16)(m, v, KEY), strict=True):
        np.testing.assert_allclose(read, of_all, rtol=1e-5)


def test_with_k_in_fp32_the_smallest_of_each_group_is_a_code_itself():
    m, v = moments()
    coarse, exact = (stored.expanded_with_exponent(steps)(m, v, KEY) for steps in (16, None))
    for moment, rounded_down, fits in ((m, coarse.m, exact.m), (v, coarse.v, exact.v)):
        size = np.abs(np.asarray(moment))
        fitting = np.flatnonzero(size.min(axis=1) > size.max(axis=1) * 2.0**-15)  # k is above 1
        assert len(fitting) > 64
        at = (fitting, np.argmin(size, axis=1)[fitting])
        np.testing.assert_allclose(fits[at], moment[at], rtol=1e-3)
        assert np.mean(np.abs(rounded_down[at] / moment[at] - 1) > 1e-3) > 0.9
    np.testing.assert_array_equal(coarse.smallest_v, exact.smallest_v)


def test_a_small_first_moment_may_be_held_above_zero():
    m = jnp.full(SHAPE, 2.0**-30).at[:, 0].set(1.0)
    v = moments()[1]
    read = stored.first_never_zero(EXPANDED, HYPER)(m, v, KEY)
    # The smallest code of E4M3 over the largest, with k = 1.
    np.testing.assert_allclose(read.m[:, 1:], 2.0**-9 / 448, rtol=1e-5)
    ours = stored.both(EXPANDED, HYPER)(m, v, KEY)
    assert np.mean(ours.m[:, 1:] == 0) > 0.9
    np.testing.assert_array_equal(read.v, ours.v)


def test_groups_are_as_small_as_a_lead_says(of_leads):
    params = {"w": jnp.zeros(SHAPE)}
    for size in (64, 32):
        lead = of_leads[f"directions and logarithms, groups of {size}"]
        state = lead.optimizer.init(params)
        assert state.mu.amax["w"].shape == state.nu.amax["w"].shape == (128, 128 // size)
        stored_bytes = sum(x.nbytes for x in jax.tree.leaves((state.mu, state.nu)))
        assert lead.bytes == stored_bytes / params["w"].size


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


def test_every_lead_follows_adam(of_leads):
    assert not set(of_leads) & set(STORAGES)
    exact = np.asarray(followed(optax.scale_by_adam(b2=B2)))
    for name, lead in of_leads.items():
        error = np.asarray(followed(lead.optimizer)) - exact
        assert 0 < np.sum(error**2) < 0.05 * np.sum(exact**2), name
