"""Laws of dynamic range expansion: of the codes, of the values, and of rounding at random."""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expansion_cases import (
    CASES,
    DRAWS,
    FLOAT32_MAX,
    LOG2_ERROR,
    PLAIN,
    SMALLEST,
    UNDITHERED,
    Case,
    decode,
    draws,
    encode,
    exact_image,
    formats,
    hostile,
    per_element,
    positive_values,
    round_exactly,
    round_trip,
    smallest_of_groups,
)

from coat_jax.numerics import expansion, noise
from coat_jax.numerics.expansion import Expanded
from coat_jax.numerics.formats import format_of

everywhere = pytest.mark.parametrize("case", CASES, ids=str)
undithered = pytest.mark.parametrize("case", UNDITHERED, ids=str)


@everywhere
def test_zero_stays_zero_signs_stay_and_nothing_non_finite_comes_out(case):
    for x, e, y in draws(case):
        assert y.shape == e.codes.shape == x.shape
        assert np.all(e.codes[x == 0] == 0)
        assert np.all(y[x == 0] == 0)
        assert np.all(e.codes * np.sign(x) >= 0)
        assert np.all(y * np.sign(x) >= 0)
        for part in (*e, y):
            assert np.all(np.isfinite(part))


@undithered
def test_a_divisor_never_becomes_zero(case):
    divisor = case._replace(rounding=f"{case.rounding} divisor")
    for (x, usual, _), (_, e, _) in zip(draws(case), draws(divisor), strict=True):
        np.testing.assert_array_equal(np.sign(e.codes), np.sign(x))
        above = (usual.codes != 0) | (x == 0)
        np.testing.assert_array_equal(e.codes[above], usual.codes[above])


@everywhere
def test_the_largest_of_a_group_is_exact(case):
    for x, e, y in draws(case):
        amax = per_element(e.amax, x.shape, case.group_size)
        largest = (np.abs(x) == amax) & (x != 0)
        np.testing.assert_array_equal(y[largest], x[largest])
        np.testing.assert_array_equal(np.abs(e.codes)[largest], format_of(case.dtype).max)
        # Each group has one, or is zero.
        off = np.where(largest | (amax == 0), 0, 1)
        assert not np.any(smallest_of_groups(off, case.group_size))


@everywhere
def test_a_constant_group_is_exact(case):
    rng = np.random.default_rng(0)
    for value in (SMALLEST, 3e-30, 0.3, FLOAT32_MAX, *np.exp2(rng.uniform(-126, 127, 8))):
        for zeros in (0, 0.5):
            chances = [0.5 - zeros / 2] * 2 + [zeros]
            x = np.asarray(rng.choice(np.float32([value, -value, 0]), case.shape, p=chances))
            np.testing.assert_array_equal(round_trip(x, case)[1], x)


@undithered
def test_nan_stays_in_its_own_place(case):
    for seed in range(DRAWS):
        x = hostile(seed, case.shape, case.group_size)
        lost = np.random.default_rng(seed).random(x.shape) < 0.2
        e, y = round_trip(np.where(lost, np.float32(np.nan), x), case, seed)
        want, y_want = round_trip(np.where(lost, np.float32(0), x), case, seed)
        want = want._replace(codes=np.where(lost, np.nan, want.codes))
        jax.tree.map(np.testing.assert_array_equal, e, want)
        np.testing.assert_array_equal(y, np.where(lost, np.nan, y_want))


@undithered
def test_infinity_is_the_largest_float32(case):
    for seed in range(DRAWS):
        x = hostile(seed, case.shape, case.group_size)
        beyond = np.random.default_rng(seed).random(x.shape) < 0.2
        largest = np.copysign(np.float32(FLOAT32_MAX), x)
        got = round_trip(np.where(beyond, np.copysign(np.float32(np.inf), x), x), case, seed)
        want = round_trip(np.where(beyond, largest, x), case, seed)
        np.testing.assert_array_equal(got[1][beyond], largest[beyond])
        jax.tree.map(np.testing.assert_array_equal, got, want)


@undithered
def test_the_code_is_the_exact_image_rounded(case):
    """To the nearest value; if stochastically, to one of its two neighbours."""
    places = ("nearest", "nearest") if case.rounding == "nearest" else ("down", "up")
    for x, e, _ in draws(case):
        image, k, _ = exact_image(x, e, case)
        image = np.where(x == 0, 0, image)
        low, high = image * 2 ** (-k * LOG2_ERROR), image * 2 ** (k * LOG2_ERROR)
        assert np.all(np.abs(e.codes) >= round_exactly(low, case.dtype, places[0]))
        assert np.all(np.abs(e.codes) <= round_exactly(high, case.dtype, places[1]))


@everywhere
def test_decoding_is_the_exact_inverse(case):
    """To 2^-17: it ends in exp2 of a number of at most 36, of which FP32 leaves 2^-18."""
    for x, e, y in draws(case):
        k = per_element(e.exponent_x16, x.shape, case.group_size) / 16
        share = np.abs(e.codes.astype(np.float64)) / format_of(case.dtype).max
        exact = per_element(e.amax, x.shape, case.group_size) * share ** (1 / k)
        flushed = (exact < SMALLEST * (1 + 2.0**-17)) & (y == 0)
        np.testing.assert_allclose(np.abs(y), np.where(flushed, 0, exact), rtol=2.0**-17)


@everywhere
def test_the_group_fills_the_format(case):
    """k is the largest sixteenth that keeps the smallest element in the format or above its bottom.

    To 1/64 of a sixteenth, `expansion.TOLERANCE`: in binades, of which there are R / k, 1/1024
    of them, and what the logarithms leave.
    """
    fmt, stochastic = format_of(case.dtype), case.rounding == "stochastic"
    # Two binades are left below the smallest element if rounding is stochastic.
    bottom, least = (4 * fmt.tiny, 8) if stochastic else (fmt.tiny, 16)
    for x, e, _ in draws(case):
        assert e.exponent_x16.dtype == np.uint8
        assert np.all(e.exponent_x16 >= least)
        image, k, _ = exact_image(x, e, case)
        under = 2 ** (-fmt.log2_range / k / 1024 - k * LOG2_ERROR)
        assert np.all((image >= bottom * under) | (x == 0) | (k == least / 16))
        x16 = e.exponent_x16.astype(np.int64) + 1
        finer, *_ = exact_image(x, e._replace(exponent_x16=x16), case)
        smallest = smallest_of_groups(np.where(x == 0, np.inf, finer), case.group_size)
        could_grow = (np.atleast_1d(e.exponent_x16) < 255) & (np.atleast_1d(e.amax) > 0)
        assert np.all(smallest[could_grow] <= bottom * 2 ** (16 * LOG2_ERROR))


@formats
@pytest.mark.parametrize(("rounding", "least"), [("nearest", 16), ("stochastic", 8)])
def test_magnitudes_under_the_smallest_count_as_zero(dtype, rounding, least):
    under = np.nextafter(np.float32(SMALLEST), np.float32(0))
    x = np.resize(np.array([under, -(2.0**-127), 1e-40, -1e-45], np.float32), PLAIN[0])
    x[2:, ::64] = -7.0
    e, y = round_trip(x, Case(*PLAIN, dtype, rounding))
    np.testing.assert_array_equal(y, np.where(x == -7, x, 0))
    np.testing.assert_array_equal(e.amax, [[0] * 4] * 2 + [[7] * 4] * 2)
    np.testing.assert_array_equal(e.exponent_x16, [[least] * 4] * 2 + [[255] * 4] * 2)


@formats
def test_every_code_survives_another_round_trip(dtype):
    """A group that holds all codes decodes to values whose code is the same, with the same k."""
    table = positive_values(dtype)
    # Of any size: the logarithms round differently for each.
    sizes = np.geomspace(2.0**-90, FLOAT32_MAX, 16)
    exponent_x16, amax = np.meshgrid([16, 17, 18, 24, 32, 48, 85, 163, 254, 255], sizes)
    codes = np.zeros((exponent_x16.size, 256), np.float32)
    codes[:, : len(table)] = table
    codes[:, 128 : 128 + len(table)] = -table
    stored = Expanded(
        codes.astype(dtype),
        amax.reshape(-1, 1).astype(np.float32),
        exponent_x16.reshape(-1, 1).astype(np.uint8),
    )
    again = encode(decode(stored, group_size=256), dtype, group_size=256)
    for got, want in zip(again, stored, strict=True):
        np.testing.assert_array_equal(np.float32(got), np.float32(want))


@formats
def test_round_trips_settle_at_the_third(dtype):
    """Decoding and encoding over and over, as an optimizer does, must not move anything.

    The first trip may round the smallest elements to zero. The second may then choose a larger k,
    and again where none of a group got the smallest code. After it one has, so k stays the same.
    """
    rng = np.random.default_rng(0)
    spread = np.exp2(rng.uniform(-4, 6, (256, 1)))
    place = rng.random((256, 128))
    place[:, :2] = 0, 1
    x = np.exp2(np.maximum(rng.uniform(-60, 100, (256, 1)) - spread * place, -120))

    def once(_, x):
        return expansion.decode(expansion.encode(x, dtype))

    trips = jax.jit(lambda x, count: jax.lax.fori_loop(0, count, once, x))
    few, many = (np.asarray(trips(np.float32(x), count)) for count in (3, 40))
    np.testing.assert_array_equal(many, few)


COUNT = 2048  # roundings with different keys


@functools.partial(jax.jit, static_argnums=(0, 2))
def drawn(rounding, x, dtype):
    """x rounded at random with each of COUNT keys: what is decoded, k and the codes."""

    def sample(step):
        u = noise.uniform(noise.leaf_key(0, step, 0), x.shape, run=128)
        e = rounding(x, dtype, noise=u)
        return expansion.decode(e), e.exponent_x16, e.codes.astype(jnp.float32)

    return jax.vmap(sample)(jnp.arange(COUNT))


def spread_out(*spreads):
    """Groups of numbers between 1 and 2^-spread, both of which they have."""
    place = np.random.default_rng(0).random((len(spreads), 128))
    place[:, :2] = 0, 1
    return np.float32(np.exp2(-np.array(spreads)[:, None] * place))


@formats
def test_stochastic_rounding_is_right_on_average(dtype):
    """The mean of x itself over many keys, each element and all of a group together."""
    x = spread_out(0.5, 3.0, 10.0, 40.0, 60.0)
    many, exponent_x16, _ = map(np.asarray, drawn(expansion.encode, x, dtype))
    stored = Expanded(None, x.max(-1, keepdims=True), exponent_x16[0])
    image, k, fmt = exact_image(x, stored, Case(x.shape, 128, dtype, "stochastic"))
    low, high = (round_exactly(image, dtype, place) for place in ("down", "up"))
    gap = high ** (1 / k) - low ** (1 / k)
    drift = many.astype(np.float64).mean(0) / x * image ** (1 / k) - image ** (1 / k)
    # `formats.stochastic_cast` is right to 0.4 % at worst, where the code is n = 1 in units
    # of its last place, and better with n^2; below that exactly, but for the noise's resolution.
    code, normal = np.searchsorted(positive_values(dtype), low), 2**fmt.mantissa_bits
    n = np.where(code < normal, code, normal + code % normal)
    allowed = np.where(n > 0, 0.004 / np.maximum(n, 1) ** 2 * image ** (1 / k), 0) + 2.0**-16 * gap
    # A mean of COUNT results has a standard deviation of at most half the gap over
    # sqrt(COUNT); beyond six of them lies one in 5e8.
    deviation = gap / 2 / np.sqrt(COUNT)
    assert np.all(np.abs(drift) <= allowed + 6 * deviation)
    total = allowed.mean(-1) + 6 * np.sqrt(np.mean(deviation**2, axis=-1) / x.shape[-1])
    assert np.all(np.abs(drift.mean(-1)) <= total)


dithered = partial(expansion.encode, dithered=True)


@formats
def test_dithered_rounding_is_right_on_average_below_the_normal_codes(dtype):
    """To 1.4 %, and exactly below the smallest code; above, to nearest within half a code more."""
    x = spread_out(3.0, 10.0, 17.0, 30.0)
    x *= np.random.default_rng(1).choice(np.float32([-1, 1]), x.shape)
    many, exponent_x16, codes = map(np.asarray, drawn(dithered, x, dtype))
    stored = Expanded(None, np.abs(x).max(-1, keepdims=True), exponent_x16[0])
    image, k, fmt = exact_image(x, stored, Case(x.shape, 128, dtype, "dithered"))
    low, high = (round_exactly(image, dtype, place) for place in ("down", "up"))
    gap = (high ** (1 / k) - low ** (1 / k)) / fmt.max ** (1 / k)
    drift = many.astype(np.float64).mean(0) * np.sign(x) - np.abs(x)
    subnormal, below = image < 2.0**fmt.min_exponent, image < fmt.tiny
    allowed = np.where(below, 2.0**-16 * gap, 0.015 * np.abs(x)) + 6 * gap / 2 / np.sqrt(COUNT)
    assert np.all(np.abs(drift)[subnormal] <= allowed[subnormal] + 1e-6 * np.abs(x)[subnormal])
    # Noise of half the smallest code moves a normal code by as much before it is rounded.
    widened = np.maximum(image - fmt.tiny / 2, 0), image + fmt.tiny / 2
    slack = 2 ** (k * LOG2_ERROR)
    assert np.all(np.abs(codes) >= round_exactly(widened[0] / slack, dtype, "nearest"))
    assert np.all(np.abs(codes) <= round_exactly(widened[1] * slack, dtype, "nearest"))
