"""Laws of 8-bit logarithms, against exact logarithms in FP64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expansion_cases import (
    FLOAT32_MAX,
    LOG2_ERROR,
    SMALLEST,
    hostile,
    hostile_noise,
    per_element,
    regimes,
    seeds,
)
from hypothesis import given
from hypothesis import strategies as st

from coat_jax.numerics import logarithms, noise
from coat_jax.numerics.expansion import Expanded

encode = jax.jit(logarithms.encode, static_argnames="group_size")
decode = jax.jit(logarithms.decode, static_argnames="group_size")

MENU = [((0,), 16), ((3, 0), 32), ((17,), 16), ((2, 3, 65), 32), ((), 128), ((4, 256), 64)]
CASES = [(shape, size, stochastic) for shape, size in MENU for stochastic in (False, True)]
everywhere = pytest.mark.parametrize(("shape", "group_size", "stochastic"), CASES, ids=str)


def positive(regimes, seed, shape, group_size):
    return np.abs(hostile(regimes, seed, shape, group_size))


def round_trip(x, group_size, stochastic, seed=0):
    u = hostile_noise(seed, x.shape) if stochastic else None
    e = encode(x, group_size=group_size, noise=u)
    return Expanded(*map(np.asarray, e)), np.asarray(decode(e, group_size=group_size))


def exact_code(x, e, group_size):
    """255 - 16 k log2(amax / x) in FP64, and 16 k."""
    steps = per_element(e.k16, x.shape, group_size)
    amax = np.maximum(per_element(e.amax, x.shape, group_size), SMALLEST)
    with np.errstate(divide="ignore"):
        return 255 - steps * (np.log2(amax) - np.log2(x.astype(np.float64))), steps


@everywhere
@given(regimes=regimes, seed=seeds)
def test_zero_stays_zero_and_nothing_non_finite_comes_out(
    shape, group_size, stochastic, regimes, seed
):
    x = positive(regimes, seed, shape, group_size)
    e, y = round_trip(x, group_size, stochastic, seed)
    assert e.codes.dtype == e.k16.dtype == np.uint8
    assert e.codes.shape == x.shape
    np.testing.assert_array_equal(e.codes[x == 0], 0)
    np.testing.assert_array_equal(y[x == 0], 0)
    for part in (*e, y):
        assert np.all(np.isfinite(part))


@everywhere
@given(regimes=regimes, seed=seeds)
def test_the_largest_of_a_group_is_exact(shape, group_size, stochastic, regimes, seed):
    x = positive(regimes, seed, shape, group_size)
    e, y = round_trip(x, group_size, stochastic, seed)
    largest = (x == per_element(e.amax, x.shape, group_size)) & (x > 0)
    np.testing.assert_array_equal(e.codes[largest], 255)
    np.testing.assert_array_equal(y[largest], x[largest])


@everywhere
@given(value=st.floats(SMALLEST, FLOAT32_MAX, width=32), seed=seeds)
def test_a_constant_group_is_exact(shape, group_size, stochastic, value, seed):
    rng = np.random.default_rng(seed)
    x = np.asarray(rng.choice(np.float32([value, 0]), shape), np.float32)
    np.testing.assert_array_equal(round_trip(x, group_size, stochastic, seed)[1], x)


@everywhere
@given(regimes=regimes, seed=seeds)
def test_the_code_is_the_exact_logarithm_rounded(shape, group_size, stochastic, regimes, seed):
    """To the nearest integer; if stochastically, to one of its two neighbours."""
    x = positive(regimes, seed, shape, group_size)
    e, _ = round_trip(x, group_size, stochastic, seed)
    exact, steps = exact_code(x, e, group_size)
    inside, slack = exact >= 1, steps * LOG2_ERROR
    low, high = exact - slack, exact + slack
    if not stochastic:
        low, high = low + 0.5, high + 0.5
    assert np.all(e.codes[inside] >= np.floor(low)[inside].clip(1))
    above = np.floor(high) + (1 if stochastic else 0)
    assert np.all(e.codes[inside] <= above[inside])


@everywhere
@given(regimes=regimes, seed=seeds)
def test_the_group_fills_the_codes(shape, group_size, stochastic, regimes, seed):
    """16 k is the largest whole number, from 7 to 255, at which the smallest has a code."""
    x = positive(regimes, seed, shape, group_size)
    e, _ = round_trip(x, group_size, stochastic, seed)
    exact, steps = exact_code(x, e, group_size)
    assert np.all((steps >= 7) & (steps <= 255))
    slack = np.where(x > 0, 2e-4 + steps * LOG2_ERROR, 0)
    fits = (exact >= 1 - slack) | (x == 0)
    assert np.all(fits | (steps == 7))
    # Where a group is not spread too widely, no number is lost.
    np.testing.assert_array_equal((e.codes == 0) & (steps > 7), (x == 0) & (steps > 7))
    finer = np.where(x > 0, exact - (255 - exact) / steps, np.inf)
    columns = x.shape[-1] if x.ndim else 1
    starts = np.arange(0, columns, group_size)
    smallest = np.minimum.reduceat(np.atleast_1d(finer), starts, axis=-1) if columns else finer
    could_grow = (np.atleast_1d(e.k16) < 255) & (np.atleast_1d(e.amax) > 0)
    assert np.all(smallest[could_grow] <= 1 + 256 * LOG2_ERROR)


@pytest.mark.parametrize("spread", [0.5, 3.0, 14.0, 30.0, 60.0])
def test_the_mean_is_right(spread):
    """Also of what is below the smallest code, which at a spread of 60 binades most numbers are."""
    rng = np.random.default_rng(0)
    group = np.exp2(-spread * rng.random(128)).astype(np.float32)
    group[:2] = 1.0, 2.0**-spread
    x = np.broadcast_to(group, (4096, 128))
    u = noise.uniform(noise.leaf_key(5, 1, 0), x.shape, run=128)
    e = encode(x, group_size=128, noise=u)
    y = np.asarray(decode(e, group_size=128), np.float64)
    smallest = logarithms.FIT.resolution
    error = np.maximum(y.std(0), np.sqrt(group * smallest)) / np.sqrt(len(y))
    assert np.all(np.abs(y.mean(0) - group) <= 6 * error + 2e-4 * group * (group > 2.0**-36))


def test_the_relative_error_is_half_of_that_of_e4m3():
    """Neighbouring codes are 2^(1 / 16k) apart; FP8 has half as many in the same range."""
    from coat_jax.numerics import expansion

    rng = np.random.default_rng(0)
    v = np.float32(np.square(rng.normal(size=(512, 128)) * np.exp(rng.normal(size=(512, 128)))))
    u = noise.uniform(noise.leaf_key(1, 1, 0), v.shape, run=128)
    ours = jax.jit(lambda v: decode(encode(v, group_size=128, noise=u), group_size=128))(v)
    e4m3 = jax.jit(lambda v: expansion.decode(expansion.encode(v, noise=u)))(v)
    ours, e4m3 = (np.sqrt(np.mean(np.square(np.asarray(y) / v - 1))) for y in (ours, e4m3))
    assert ours < 0.5 * e4m3


@pytest.mark.parametrize("stochastic", [False, True])
def test_encoding_again_changes_nothing(stochastic):
    """But for the rounding of logarithms: what is decoded has a code."""
    rng = np.random.default_rng(0)
    x = np.float32(np.exp2(-20 * rng.random((64, 128))))
    u = [noise.uniform(noise.leaf_key(2, t, 0), x.shape, run=128) for t in (1, 2)]
    once = encode(x, group_size=128, noise=u[0] if stochastic else None)
    y = decode(once, group_size=128)
    twice = encode(y, group_size=128, noise=u[1] if stochastic else None)
    same = np.asarray(once.k16 == twice.k16)[:, 0]
    assert np.mean(same) > 0.8  # where the smallest moved, another exponent may fit
    assert np.mean(np.asarray(once.codes != twice.codes)[same]) < 1e-3


@pytest.mark.parametrize("lost", [np.nan, -1.0, -np.inf, 1e-42])
def test_nan_and_negative_numbers_become_zero_and_change_no_other(lost):
    rng = np.random.default_rng(0)
    x = np.float32(np.exp(rng.normal(size=(8, 128))))
    where = rng.random(x.shape) < 0.2
    e, _ = round_trip(np.where(where, np.float32(lost), x), 128, False)
    without, _ = round_trip(np.where(where, np.float32(0), x), 128, False)
    jax.tree.map(np.testing.assert_array_equal, e, without)
    np.testing.assert_array_equal(e.codes[where], 0)


def test_infinity_is_the_largest_float32():
    _, y = round_trip(np.float32([[np.inf] + [1.0] * 15]), 16, False)
    assert y[0, 0] == np.float32(FLOAT32_MAX)


def test_integers_are_refused():
    with pytest.raises(TypeError, match="x has dtype int32"):
        logarithms.encode(jnp.ones((2, 16), jnp.int32), group_size=16)


@pytest.mark.parametrize("binades", [36.0, 14.0, 3.0])
def test_between_two_codes_the_mean_of_the_value_is_right_not_that_of_its_logarithm(binades):
    """The noise takes each of its values once, so that the mean has no error of its own.

    A logarithm that is right on average would be up to 0.12 % off here. A second moment adds up
    such errors over 1 / (1 - b2) steps.
    """
    group = np.exp2(-np.linspace(0, binades, 128)).astype(np.float32)
    x = np.broadcast_to(group, (8192, 128))
    each = (np.arange(8192, dtype=np.float32) + 0.5) / 8192
    e = encode(x, group_size=128, noise=np.broadcast_to(each[:, None], x.shape))
    inside = exact_code(x[:1], Expanded(*(np.asarray(part[:1]) for part in e)), 128)[0][0] >= 1
    mean = np.asarray(decode(e, group_size=128), np.float64).mean(0)
    np.testing.assert_allclose(mean[inside], group[inside], rtol=5e-5)
