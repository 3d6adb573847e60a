"""Laws of 8-bit logarithms, against exact logarithms in FP64."""

import functools

import jax
import numpy as np
import pytest
from expansion_cases import (
    DRAWS,
    FLOAT32_MAX,
    LOG2_ERROR,
    SHAPES,
    SMALLEST,
    hostile,
    hostile_noise,
    per_element,
    smallest_of_groups,
)

from coat_jax.numerics import logarithms, noise
from coat_jax.numerics.expansion import Expanded


@functools.partial(jax.jit, static_argnames="group_size")
def both(x, noise, group_size):
    """x encoded to nearest and at random, and what is decoded."""
    encoded = [logarithms.encode(x, group_size=group_size, noise=u) for u in (None, noise)]
    return [(e, logarithms.decode(e, group_size=group_size)) for e in encoded]


CASES = [(shape, size, stochastic) for shape, size in SHAPES for stochastic in (False, True)]
everywhere = pytest.mark.parametrize("case", CASES, ids=str)


def round_trip(x, group_size=128, stochastic=False, noise=None):
    noise = hostile_noise(0, x.shape) if noise is None else noise
    e, y = both(x, noise, group_size)[stochastic]
    return Expanded(*map(np.asarray, e)), np.asarray(y)


@functools.cache
def draws(case):
    """Hostile numbers, none negative, encoded as the case asks, and decoded again."""
    shape, size, stochastic = case
    xs = [np.abs(hostile(seed, shape, size)) for seed in range(DRAWS)]
    noises = [hostile_noise(seed, shape) for seed in range(DRAWS)]
    return [(x, *round_trip(x, size, stochastic, u)) for x, u in zip(xs, noises, strict=True)]


def exact_code(x, e, group_size):
    """255 - 16 k log2(amax / x) in FP64, and 16 k."""
    steps = per_element(e.exponent_x16, x.shape, group_size)
    amax = np.maximum(per_element(e.amax, x.shape, group_size), SMALLEST)
    with np.errstate(divide="ignore"):
        return 255 - steps * (np.log2(amax) - np.log2(x.astype(np.float64))), steps


@everywhere
def test_zero_and_the_largest_are_exact_and_nothing_non_finite_comes_out(case):
    for x, e, y in draws(case):
        assert e.codes.dtype == e.exponent_x16.dtype == np.uint8
        assert e.codes.shape == x.shape
        np.testing.assert_array_equal(e.codes[x == 0], 0)
        largest = (x == per_element(e.amax, x.shape, case[1])) & (x > 0)
        np.testing.assert_array_equal(e.codes[largest], 255)
        exact = largest | (x == 0)
        np.testing.assert_array_equal(y[exact], x[exact])
        for part in (*e, y):
            assert np.all(np.isfinite(part))


@everywhere
def test_a_constant_group_is_exact(case):
    shape, size, stochastic = case
    rng = np.random.default_rng(0)
    for value in (SMALLEST, 0.3, FLOAT32_MAX, *np.exp2(rng.uniform(-126, 127, 8))):
        x = np.asarray(rng.choice(np.float32([value, 0]), shape), np.float32)
        np.testing.assert_array_equal(round_trip(x, size, stochastic)[1], x)


@everywhere
def test_the_code_is_the_exact_logarithm_rounded(case):
    """To the nearest integer; if stochastically, to one of its two neighbours."""
    for x, e, _ in draws(case):
        exact, steps = exact_code(x, e, case[1])
        inside, slack = exact >= 1, steps * LOG2_ERROR
        low, high = exact - slack, exact + slack
        if not case[2]:
            low, high = low + 0.5, high - 0.5
        assert np.all(e.codes[inside] >= np.floor(low)[inside].clip(1))
        assert np.all(e.codes[inside] <= np.floor(high + 1)[inside])
        if not case[2]:  # below the smallest code, which is 1: to the nearer of it and zero
            halves = np.exp2((exact - 1) / np.maximum(steps, 1)) / 0.5
            assert np.all(e.codes[~inside & (halves > 1.001)] == 1)
            assert np.all(e.codes[halves < 0.999] == 0)


@everywhere
def test_decoding_is_the_exact_inverse(case):
    for x, e, y in draws(case):
        amax, steps = (per_element(of, x.shape, case[1]) for of in (e.amax, e.exponent_x16))
        exact = np.where(e.codes > 0, amax * np.exp2((e.codes - 255.0) / np.maximum(steps, 1)), 0)
        # XLA may flush the smallest numbers, and the least that its exp2 returns is exp(-87.28).
        smallest = exact < 1.06 * SMALLEST
        assert np.all(y[smallest] <= 1.06 * SMALLEST)
        np.testing.assert_allclose(y[~smallest], exact[~smallest], rtol=2.0**-17)


@everywhere
def test_the_group_fills_the_codes(case):
    """16 k is the largest whole number, from 7 to 255, at which the smallest has a code."""
    for x, e, _ in draws(case):
        exact, steps = exact_code(x, e, case[1])
        assert np.all((steps >= 7) & (steps <= 255))
        slack = np.where(x > 0, 2e-4 + steps * LOG2_ERROR, 0)
        assert np.all((exact >= 1 - slack) | (x == 0) | (steps == 7))
        # Where a group is not spread too widely, no number is lost.
        np.testing.assert_array_equal((e.codes == 0) & (steps > 7), (x == 0) & (steps > 7))
        finer = np.where(x > 0, exact - (255 - exact) / steps, np.inf)
        could_grow = (np.atleast_1d(e.exponent_x16) < 255) & (np.atleast_1d(e.amax) > 0)
        smallest = smallest_of_groups(finer, case[1])
        assert np.all(smallest[could_grow] <= 1 + 256 * LOG2_ERROR)


def test_the_mean_is_right():
    """Also of what is below the smallest code, which at a spread of 60 binades most numbers are."""
    for spread in (0.5, 3.0, 14.0, 30.0, 60.0):
        group = np.exp2(-spread * np.random.default_rng(0).random(128)).astype(np.float32)
        group[:2] = 1.0, 2.0**-spread
        x = np.broadcast_to(group, (4096, 128))
        u = noise.uniform(noise.leaf_key(5, 1, 0), x.shape, run=128)
        y = round_trip(x, stochastic=True, noise=u)[1].astype(np.float64)
        error = np.maximum(y.std(0), np.sqrt(group * logarithms.RESOLUTION)) / np.sqrt(len(y))
        assert np.all(np.abs(y.mean(0) - group) <= 6 * error + 2e-4 * group * (group > 2.0**-36))


@pytest.mark.parametrize("binades", [36.0, 14.0, 3.0])
def test_between_two_codes_the_mean_of_the_value_is_right_not_that_of_its_logarithm(binades):
    """The noise takes each of its values once, so that the mean has no error of its own.

    A logarithm that is right on average would be up to 0.12 % off here. A second moment adds up
    such errors over 1 / (1 - b2) steps.
    """
    group = np.exp2(-np.linspace(0, binades, 128)).astype(np.float32)
    x = np.broadcast_to(group, (4096, 128))
    each = (np.arange(4096, dtype=np.float32) + 0.5) / 4096
    e, y = round_trip(x, stochastic=True, noise=np.broadcast_to(each[:, None], x.shape))
    inside = exact_code(x[:1], Expanded(*(part[:1] for part in e)), 128)[0][0] >= 1
    np.testing.assert_allclose(y.mean(0, np.float64)[inside], group[inside], rtol=5e-5)


@pytest.mark.parametrize("stochastic", [False, True])
def test_encoding_again_changes_nothing(stochastic):
    """But for the rounding of logarithms: what is decoded has a code."""
    x = np.float32(np.exp2(-20 * np.random.default_rng(0).random((4096, 128))))
    u = [noise.uniform(noise.leaf_key(2, t, 0), x.shape, run=128) for t in (1, 2)]
    once, y = round_trip(x, stochastic=stochastic, noise=u[0])
    twice, _ = round_trip(y, stochastic=stochastic, noise=u[1])
    same = (once.exponent_x16 == twice.exponent_x16)[:, 0]
    assert np.mean(same) > 0.8  # where the smallest moved, another exponent may fit
    assert np.mean((once.codes != twice.codes)[same]) < 1e-3


def test_what_is_not_a_positive_number_becomes_zero_and_changes_no_other():
    rng = np.random.default_rng(0)
    x = np.float32(np.exp(rng.normal(size=(512, 128))))
    where = rng.random(x.shape) < 0.2
    without, _ = round_trip(np.where(where, np.float32(0), x))
    for lost in np.float32([np.nan, -1.0, -np.inf, 1e-42]):
        e, _ = round_trip(np.where(where, lost, x))
        jax.tree.map(np.testing.assert_array_equal, e, without)
        np.testing.assert_array_equal(e.codes[where], 0)
    infinite = np.where(where, np.float32(np.inf), x)
    np.testing.assert_array_equal(round_trip(infinite)[1][where], np.float32(FLOAT32_MAX))
