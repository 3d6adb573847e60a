"""Laws of the FP8 casts. The oracle is the table of all 256 codes of a format.

Rounding to nearest is compared with the table exactly. Stochastic rounding is not sampled
but averaged over an even grid of noise, so its expectation is known to 1 / (2 GRID).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expansion_cases import FLOAT32_MAX, LAST_NOISE, formats, positive_values

import coat_jax as coat
from coat_jax.numerics.formats import (
    format_of,
    round_at_random,
    saturating_cast,
    stochastic_cast,
)

GRID = 2048
nearest = jax.jit(saturating_cast, static_argnames="dtype")
stochastic = jax.jit(stochastic_cast, static_argnames="dtype")


def as_float64(codes):
    return np.asarray(codes).astype(np.float64)


def nearest_by_table(x, dtype):
    """Rounds to the nearest value, of two equally near ones to the even code."""
    table = positive_values(dtype)
    magnitude = np.minimum(np.abs(np.asarray(x, np.float64)), table[-1])
    upper = np.clip(np.searchsorted(table, magnitude), 1, len(table) - 1)
    below, above = magnitude - table[upper - 1], table[upper] - magnitude
    take_upper = (above < below) | ((above == below) & (upper % 2 == 0))
    return np.copysign(table[np.where(take_upper, upper, upper - 1)], x)


def any_floats():
    """Numbers of every exponent, and some around the format's."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 4096, dtype=np.uint32).view(np.float32)
    bits = bits[np.isfinite(bits) & (np.abs(bits) >= 2.0**-126)]
    near = rng.standard_normal(4096) * np.exp2(rng.uniform(-20, 18, 4096))
    return np.float32([0.0, -0.0, *bits, *near])


def constant(noise, x):
    return np.full(x.shape, noise, np.float32)


def mean_over_noise(x, dtype, curvature=0.0, power=1.0):
    """The mean of rounded^power over GRID evenly spaced noises, for each element of x."""
    noise = np.broadcast_to(np.float32((np.arange(GRID) + 0.5) / GRID), (*x.shape, GRID))
    codes = stochastic(np.float32(x)[..., None], dtype, noise, curvature=curvature)
    codes = np.asarray(codes).view(np.uint8)
    values = positive_values(dtype) ** power
    return np.where(codes < 128, 1, -1).mean(-1) * values[codes & 127].mean(-1)


def between_codes(dtype, fractions):
    """Points inside each gap of the table, exact in FP32: shape [gaps, fractions]."""
    table = positive_values(dtype)
    return table[:-1, None] + np.diff(table)[:, None] * np.asarray(fractions)


@formats
def test_limits_are_those_of_the_dtype(dtype):
    fmt, table, info = format_of(dtype), positive_values(dtype), jnp.finfo(dtype)
    assert fmt.max == table[-1] == info.max
    assert fmt.tiny == table[1] == info.smallest_subnormal
    assert 2.0**fmt.min_exponent == info.smallest_normal
    assert fmt.mantissa_bits == info.nmant
    assert 2.0**fmt.log2_range == pytest.approx(fmt.max / fmt.tiny, rel=1e-12)


@formats
def test_nearest_is_the_nearest_of_the_table(dtype):
    """Inside of a program, too, that casts back: XLA may drop both casts where it is told so."""
    inside = between_codes(dtype, [0, 0.25, 0.5 - 2**-12, 0.5, 0.5 + 2**-12, 0.75]).ravel()
    x = np.concatenate([inside, -inside, any_floats()]).astype(np.float32)
    there_and_back = jax.jit(lambda x: saturating_cast(x, dtype).astype(jnp.float32))
    for got in (nearest(x, dtype), there_and_back(x)):
        np.testing.assert_array_equal(as_float64(got), nearest_by_table(x, dtype))


@formats
@pytest.mark.parametrize("noise", [0.0, 0.5, LAST_NOISE])
def test_values_of_the_format_stay_and_too_large_ones_become_the_largest(dtype, noise):
    """Zero keeps its sign, and NaN stays in its own place."""
    table, limit = positive_values(dtype), format_of(dtype).max
    large = [limit * (1 + 2**-20), limit * 1.07, 1e30, FLOAT32_MAX, np.inf]
    x = np.float32([*table, *-table, *large, *np.negative(large), np.nan])
    want = np.clip(x, -limit, limit)
    np.testing.assert_array_equal(as_float64(nearest(x, dtype)), want)
    for curvature in (-1.0, 0.0, 0.5, 1 - 16 / 255):
        got = as_float64(stochastic(x, dtype, constant(noise, x), curvature=curvature))
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(np.signbit(got)[:-1], np.signbit(x)[:-1])


@formats
@pytest.mark.parametrize("curvature", [-1, 0.0, 0.3, 0.9375])
def test_stochastic_result_is_a_neighbour(dtype, curvature):
    table, x = positive_values(dtype), any_floats()
    magnitude = np.minimum(np.abs(x), table[-1])
    floor = table[np.searchsorted(table, magnitude, side="right") - 1]
    ceiling = table[np.searchsorted(table, magnitude)]
    for noise in (0.0, 1e-7, 0.3, 0.999, LAST_NOISE):
        got = as_float64(stochastic(x, dtype, constant(noise, x), curvature=curvature))
        assert np.all((np.abs(got) == floor) | (np.abs(got) == ceiling))
        np.testing.assert_array_equal(np.signbit(got), np.signbit(x))


@formats
def test_stochastic_cast_is_right_on_average(dtype):
    x = between_codes(dtype, [0.01, 0.125, 0.25, 0.5, 0.625, 0.77, 0.99])
    gap = np.diff(positive_values(dtype))[:, None]
    # The grid resolves the probability to 1 / (2 GRID), of which one gap is at stake.
    assert np.all(np.abs(mean_over_noise(x, dtype) - x) <= gap / (2 * GRID) * 1.001)
    assert np.all(np.abs(mean_over_noise(-x, dtype) + x) <= gap / (2 * GRID) * 1.001)


@formats
@pytest.mark.parametrize("exponent_x16", [8, 17, 24, 48, 255])
def test_curved_rounding_keeps_the_mean_of_the_power(dtype, exponent_x16):
    """The drift of x^a in one rounding is what `stochastic_cast` promises, at most.

    5e-5 for normal numbers, 1.5e-3 for the smallest subnormal and better with n^2 above it.
    """
    a, fmt = 16 / exponent_x16, format_of(dtype)
    # From the smallest code up: below it the expansion has no values.
    x = between_codes(dtype, [0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875])[1:]
    mean = mean_over_noise(x, dtype, curvature=1 - a, power=a)
    table = positive_values(dtype)[1:, None]
    resolution = (table[1:] ** a - table[:-1] ** a) / (2 * GRID)
    drift = (np.abs(mean - x**a) - resolution) / x**a
    n = np.arange(1, len(x) + 1)[:, None]
    allowed = np.where(n < 2**fmt.mantissa_bits, 1.5e-3 / n**2, 5e-5)
    worst = np.unravel_index(np.argmax(drift / allowed), x.shape)
    assert drift[worst] <= allowed[worst[0], 0], f"x = {x[worst]}, a = {a}"


@pytest.mark.parametrize("dtype", [None, "nonsense", jnp.float32, "int8", 8, jnp.float8_e4m3])
def test_an_unknown_dtype_is_refused_with_a_remedy(dtype):
    for call in (
        lambda: format_of(dtype),
        lambda: saturating_cast(jnp.ones(2), dtype),
        lambda: stochastic_cast(jnp.ones(2), dtype, jnp.zeros(2)),
    ):
        with pytest.raises(ValueError, match=r"not an FP8 format.*coat\.formats\.E4M3.*E5M2"):
            call()


@formats
def test_values_that_are_rounded_before_a_cast_are_those_of_the_cast(dtype):
    """Codes, the middles between them, their FP32 neighbours, and numbers of every exponent."""
    codes = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    codes = np.sort(codes[np.isfinite(codes)])
    middles = (codes[1:] + codes[:-1]) / 2
    near = [np.nextafter(middles, np.float32(sign * np.inf)) for sign in (-1, 1)]
    others = np.arange(0, 2**32, 99_991, dtype=np.uint64).astype(np.uint32).view(np.float32)
    x = jnp.asarray(np.concatenate([codes, middles, *near, others]))
    want = saturating_cast(x, dtype)
    got = jax.jit(coat.formats.nearest, static_argnums=1)(x, dtype)
    np.testing.assert_array_equal(got, np.float32(want))
    np.testing.assert_array_equal(np.float32(got.astype(dtype)), np.float32(want))


@formats
def test_rounding_before_a_cast_has_the_derivative_of_the_cast(dtype):
    """Of a second derivative, an op must see that it is asked for it: it is not zero."""
    x, tangent = jnp.asarray([0.3, -5.1], jnp.bfloat16), jnp.asarray([2.0, 3.0], jnp.bfloat16)
    _, got = jax.jvp(lambda x: coat.formats.nearest(x, dtype), (x,), (tangent,))
    np.testing.assert_array_equal(got, np.float32(tangent))


@formats
def test_every_nan_is_still_one_when_it_is_rounded_at_random(dtype):
    """On GPUs all bits but the sign are set in a NaN: a carry would make a zero of it."""
    nans = np.array([0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view(np.float32)
    all_set = np.full(4, 0xFFFFFFFF, np.uint32)
    assert np.all(np.isnan(round_at_random(jnp.asarray(nans), dtype, jnp.asarray(all_set))))
