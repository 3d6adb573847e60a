"""Laws of 8-bit integers with one scale per group."""

import functools

import jax
import numpy as np
import pytest
from expansion_cases import DRAWS, SHAPES, hostile, hostile_noise, per_element

from coat_jax.numerics import integers, noise
from coat_jax.numerics.expansion import Expanded

CASES = [(shape, size, below) for shape, size in SHAPES for below in (0, 10, np.inf)]
everywhere = pytest.mark.parametrize(("shape", "group_size", "below"), CASES, ids=str)


@functools.partial(jax.jit, static_argnames="group_size")
def encoded(x, noise, below, group_size):
    e = integers.encode(x, group_size=group_size, noise=noise, stochastic_below=below)
    return e, integers.decode(e, group_size=group_size)


def round_trip(x, group_size, below, noise=None):
    noise = hostile_noise(0, x.shape) if noise is None else noise
    e, y = encoded(x, noise, below, group_size)
    return Expanded(*map(np.asarray, e)), np.asarray(y)


@everywhere
def test_the_code_is_the_exact_one_rounded(shape, group_size, below):
    """To the nearest integer from `below` on, and else to one of its two neighbours."""
    for seed in range(DRAWS):
        x = hostile(seed, shape, group_size)
        e, y = round_trip(x, group_size, below, hostile_noise(seed, shape))
        x = np.clip(x, -(2.0**100), 2.0**100)
        assert e.codes.dtype == np.int8
        np.testing.assert_array_equal(e.exponent_x16, 16)
        amax = per_element(e.amax, x.shape, group_size)
        exact = 127 * x.astype(np.float64) / np.where(amax > 0, amax, 1)
        off = np.abs(e.codes - exact)
        assert np.all(off[np.abs(exact) >= below] <= 0.5 + 1e-4)
        assert np.all(off <= 1 + 1e-4)
        np.testing.assert_array_equal(e.codes[x == 0], 0)
        assert np.all(np.abs(e.codes[(np.abs(x) == amax) & (amax > 0)].astype(int)) == 127)
        np.testing.assert_allclose(y, e.codes / 127.0 * amax, rtol=2.0**-22)
        for part in (*e, y):
            assert np.all(np.isfinite(part))


@everywhere
def test_a_constant_group_is_exact_to_fp32(shape, group_size, below):
    x = np.full(shape, -0.3, np.float32)
    np.testing.assert_allclose(round_trip(x, group_size, below)[1], x, rtol=2.0**-22)


def test_without_noise_codes_are_rounded_to_nearest():
    x = np.linspace(-127, 127, 1016, dtype=np.float32).reshape(1, -1)
    codes = integers.encode(x, group_size=1024).codes
    np.testing.assert_array_equal(codes, np.floor(x.astype(np.float64) + 0.5))


def test_the_mean_is_right_where_rounding_is_stochastic():
    group = np.linspace(-1, 1, 128, dtype=np.float32)
    x = np.broadcast_to(group, (4096, 128))
    u = noise.uniform(noise.leaf_key(5, 1, 0), x.shape, run=128)
    error = np.abs(round_trip(x, 128, np.inf, u)[1].astype(np.float64).mean(0) - group)
    assert np.all(error <= 6 * 0.5 / 127 / np.sqrt(len(x)) + 1e-6)


def test_what_has_no_code_touches_no_neighbour():
    """NaN becomes a small number, infinity the largest one."""
    rng = np.random.default_rng(0)
    x = np.float32(rng.normal(size=(4096, 128)))
    x[:8] = 0
    where = rng.random(x.shape) < 0.2
    e, y = round_trip(np.where(where, np.float32(np.nan), x), 128, 0)
    without, _ = round_trip(np.where(where, np.float32(0), x), 128, 0)
    np.testing.assert_array_equal(e.amax, without.amax)
    np.testing.assert_array_equal(e.codes, np.where(where, -1, without.codes))
    np.testing.assert_array_equal(y[:8], 0)
    assert np.all(np.isfinite(y))
    _, y = round_trip(np.where(where, np.float32(-np.inf), x), 128, 0)
    np.testing.assert_allclose(y[where], -(2.0**100), rtol=1e-6)
