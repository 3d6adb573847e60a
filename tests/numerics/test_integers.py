"""Laws of 8-bit integers with one scale per group."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expansion_cases import hostile, hostile_noise, per_element, regimes, seeds
from hypothesis import given

from coat_jax.numerics import integers, noise
from coat_jax.numerics.expansion import Expanded

encode = jax.jit(integers.encode, static_argnames="group_size")
decode = jax.jit(integers.decode, static_argnames="group_size")

MENU = [((0,), 16), ((3, 0), 32), ((17,), 16), ((2, 3, 65), 32), ((), 128), ((4, 256), 64)]
CASES = [(shape, size, below) for shape, size in MENU for below in (0, 10, np.inf)]
everywhere = pytest.mark.parametrize(("shape", "group_size", "below"), CASES, ids=str)


def round_trip(x, group_size, below, seed=0):
    e = encode(x, group_size=group_size, noise=hostile_noise(seed, x.shape), stochastic_below=below)
    return Expanded(*map(np.asarray, e)), np.asarray(decode(e, group_size=group_size))


@everywhere
@given(regimes=regimes, seed=seeds)
def test_the_code_is_the_exact_one_rounded(shape, group_size, below, regimes, seed):
    """To the nearest integer from `below` on, and else to one of its two neighbours."""
    x = hostile(regimes, seed, shape, group_size)
    e, y = round_trip(x, group_size, below, seed)
    x = np.clip(x, -(2.0**100), 2.0**100)
    assert e.codes.dtype == np.int8
    np.testing.assert_array_equal(e.k16, 16)
    amax = per_element(e.amax, x.shape, group_size)
    exact = 127 * x.astype(np.float64) / np.where(amax > 0, amax, 1)
    off = np.abs(e.codes - exact)
    assert np.all(off[np.abs(exact) >= below] <= 0.5 + 1e-4)
    assert np.all(off <= 1 + 1e-4)
    np.testing.assert_array_equal(e.codes[x == 0], 0)
    assert np.all(np.sign(y) * np.sign(x) >= 0)
    assert np.all(np.abs(e.codes[(np.abs(x) == amax) & (amax > 0)].astype(int)) == 127)
    for part in (*e, y):
        assert np.all(np.isfinite(part))


@everywhere
def test_a_constant_group_is_exact_to_fp32(shape, group_size, below):
    x = np.full(shape, -0.3, np.float32)
    np.testing.assert_allclose(round_trip(x, group_size, below)[1], x, rtol=2.0**-22)


def test_the_mean_is_right_where_rounding_is_stochastic():
    group = np.linspace(-1, 1, 128, dtype=np.float32)
    x = np.broadcast_to(group, (4096, 128))
    u = noise.uniform(noise.leaf_key(5, 1, 0), x.shape, run=128)
    y = decode(encode(x, group_size=128, noise=u), group_size=128)
    error = np.abs(np.asarray(y, np.float64).mean(0) - group)
    assert np.all(error <= 6 * 0.5 / 127 / np.sqrt(len(x)) + 1e-6)


def test_nan_becomes_a_small_number_and_touches_no_neighbour():
    rng = np.random.default_rng(0)
    x = np.float32(rng.normal(size=(8, 128)))
    where = rng.random(x.shape) < 0.2
    e, y = round_trip(np.where(where, np.float32(np.nan), x), 128, 0)
    without, _ = round_trip(np.where(where, np.float32(0), x), 128, 0)
    np.testing.assert_array_equal(e.amax, without.amax)
    np.testing.assert_array_equal(e.codes, np.where(where, -1, without.codes))
    assert np.all(np.isfinite(y))


def test_a_group_of_nan_is_a_group_of_zeros():
    _, y = round_trip(np.full((2, 128), np.nan, np.float32), 128, 0)
    np.testing.assert_array_equal(y, 0)


def test_infinity_is_the_largest():
    _, y = round_trip(np.float32([[-np.inf] + [1.0] * 15]), 16, 0)
    np.testing.assert_allclose(y[0, 0], -(2.0**100), rtol=1e-6)


def test_integers_are_refused():
    with pytest.raises(TypeError, match="x has dtype int32"):
        integers.encode(jnp.ones((2, 16), jnp.int32), group_size=16)
