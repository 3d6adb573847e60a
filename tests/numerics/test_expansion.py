"""Laws of dynamic range expansion: of the codes, of the values, and of rounding at random."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expansion_cases import (
    CASES,
    FLOAT32_MAX,
    HEADROOM,
    LOG2_ERROR,
    MENU,
    PLAIN,
    SMALLEST,
    Case,
    decode,
    encode,
    encode_dithered,
    encoded,
    everywhere,
    exact_image,
    formats,
    hostile,
    hostile_noise,
    per_element,
    positive_values,
    regimes,
    round_exactly,
    round_trip,
    roundings,
    seeds,
)
from hypothesis import given
from hypothesis import strategies as st

from coat_jax.numerics import expansion, noise
from coat_jax.numerics.expansion import Expanded
from coat_jax.numerics.formats import format_of


@pytest.mark.costly
@everywhere
@given(regimes=regimes, seed=seeds)
def test_zero_stays_zero(case, regimes, seed):
    x = hostile(regimes, seed, case.shape, case.group_size)
    e, y = round_trip(x, case, seed)
    assert y.shape == e.codes.shape == x.shape
    assert np.all(e.codes[x == 0] == 0)
    assert np.all(y[x == 0] == 0)


@pytest.mark.costly
@everywhere
@given(regimes=regimes, seed=seeds)
def test_only_what_is_below_the_smallest_code_becomes_zero(case, regimes, seed):
    """Below half of it, to nearest. Everything else keeps its sign."""
    x = hostile(regimes, seed, case.shape, case.group_size)
    e, y = round_trip(x, case, seed)
    image, k, fmt = exact_image(x, e, case)
    zero = (e.codes == 0) & (x != 0)
    limit = fmt.tiny if case.stochastic else fmt.tiny / 2
    assert np.all(image[zero] <= limit * 2 ** (k[zero] * LOG2_ERROR))
    np.testing.assert_array_equal(np.sign(e.codes[~zero]), np.sign(x[~zero]))
    assert np.all(np.sign(y[~zero]) * np.sign(x[~zero]) >= 0)


@pytest.mark.costly
@everywhere
@given(regimes=regimes, seed=seeds)
def test_a_divisor_never_becomes_zero(case, regimes, seed):
    x = hostile(regimes, seed, case.shape, case.group_size)
    e = encoded(x, case, seed, never_zero=True)
    codes = np.asarray(e.codes).astype(np.float32)
    np.testing.assert_array_equal(np.sign(codes), np.sign(x))
    usual, _ = round_trip(x, case, seed)
    above = (usual.codes != 0) | (x == 0)
    np.testing.assert_array_equal(codes[above], usual.codes[above])


@pytest.mark.costly
@everywhere
@given(regimes=regimes, seed=seeds)
def test_the_largest_of_a_group_is_exact(case, regimes, seed):
    x = hostile(regimes, seed, case.shape, case.group_size)
    e, y = round_trip(x, case, seed)
    largest = (np.abs(x) == per_element(e.amax, x.shape, case.group_size)) & (x != 0)
    np.testing.assert_array_equal(y[largest], x[largest])
    np.testing.assert_array_equal(np.abs(e.codes)[largest], format_of(case.dtype).max)
    places = np.arange(x.shape[-1] if x.shape else 1) // case.group_size
    found = np.atleast_1d(largest | (per_element(e.amax, x.shape, case.group_size) == 0))
    assert all(np.all(found[..., places == place].any(-1)) for place in set(places))


@pytest.mark.costly
@everywhere
@given(
    value=st.floats(SMALLEST, FLOAT32_MAX, width=32),
    zeros=st.sampled_from([0.0, 0.5]),
    seed=seeds,
)
def test_a_constant_group_is_exact(case, value, zeros, seed):
    rng = np.random.default_rng(seed)
    x = rng.choice(np.float32([value, -value, 0]), case.shape, p=[0.5 - zeros / 2] * 2 + [zeros])
    _, y = round_trip(np.asarray(x), case, seed)
    np.testing.assert_array_equal(y, x)


@everywhere
@given(regimes=regimes, seed=seeds)
def test_nothing_non_finite_comes_out_of_finite_numbers(case, regimes, seed):
    x = hostile(regimes, seed, case.shape, case.group_size)
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, x.shape, dtype=np.uint32)  # any float, denormals too
    anything = np.where(np.isfinite(bits.view(np.float32)), bits.view(np.float32), 1e-42)
    x = np.where(rng.random(x.shape) < 0.1, anything, x).astype(np.float32)
    e, y = round_trip(x, case, seed)
    for part in (*e, y):
        assert np.all(np.isfinite(part))


@everywhere
@given(regimes=regimes, seed=seeds)
def test_nan_stays_in_its_own_place(case, regimes, seed):
    x = hostile(regimes, seed, case.shape, case.group_size)
    lost = np.random.default_rng(seed).random(x.shape) < 0.2
    e, y = round_trip(np.where(lost, np.float32(np.nan), x), case, seed)
    e_without, y_without = round_trip(np.where(lost, np.float32(0), x), case, seed)
    np.testing.assert_array_equal(e.amax, e_without.amax)
    np.testing.assert_array_equal(e.k16, e_without.k16)
    np.testing.assert_array_equal(e.codes, np.where(lost, np.nan, e_without.codes))
    np.testing.assert_array_equal(y, np.where(lost, np.nan, y_without))


@pytest.mark.costly
@everywhere
@given(regimes=regimes, seed=seeds)
def test_infinity_is_the_largest_float32(case, regimes, seed):
    x = hostile(regimes, seed, case.shape, case.group_size)
    beyond = np.random.default_rng(seed).random(x.shape) < 0.2
    sign = np.where(np.signbit(x), -1, 1).astype(np.float32)
    e, y = round_trip(np.where(beyond, sign * np.float32(np.inf), x), case, seed)
    e_largest, y_largest = round_trip(
        np.where(beyond, sign * np.float32(FLOAT32_MAX), x), case, seed
    )
    np.testing.assert_array_equal(y[beyond], sign[beyond] * np.float32(FLOAT32_MAX))
    for got, want in zip((*e, y), (*e_largest, y_largest), strict=True):
        np.testing.assert_array_equal(got, want)


@everywhere
@given(regimes=regimes, seed=seeds)
def test_the_code_is_the_exact_image_rounded(case, regimes, seed):
    """To the nearest value; if stochastically, to one of its two neighbours."""
    x = hostile(regimes, seed, case.shape, case.group_size)
    e, _ = round_trip(x, case, seed)
    image, k, _ = exact_image(x, e, case)
    image = np.where(x == 0, 0, image)
    low, high = image * 2 ** (-k * LOG2_ERROR), image * 2 ** (k * LOG2_ERROR)
    places = ("down", "up") if case.stochastic else ("nearest", "nearest")
    assert np.all(np.abs(e.codes) >= round_exactly(low, case.dtype, places[0]))
    assert np.all(np.abs(e.codes) <= round_exactly(high, case.dtype, places[1]))


@pytest.mark.costly
@everywhere
@given(regimes=regimes, seed=seeds)
def test_the_error_is_that_of_the_code_shrunk_by_k(case, regimes, seed):
    x = hostile(regimes, seed, case.shape, case.group_size)
    e, y = round_trip(x, case, seed)
    image, k, fmt = exact_image(x, e, case)
    nonzero = (x != 0) & (y != 0)
    image, k, x, y = image[nonzero], k[nonzero], np.abs(x[nonzero]), np.abs(y[nonzero])
    image = np.maximum(image, np.finfo(np.float64).tiny)
    # In units of rounding to nearest: half a last place, or half the smallest code.
    units = 2 if case.stochastic else 1
    error = units * np.maximum(2.0 ** -(fmt.mantissa_bits + 1), fmt.tiny / 2 / image)
    # What falls under the smallest code and is rounded up has gone all of the way to it.
    up = np.maximum(np.log2(1 + error), np.log2(fmt.tiny / image))
    down = -np.log2(np.maximum(1 - error, fmt.tiny / np.maximum(image, fmt.tiny)))
    log2_change = np.log2(y.astype(np.float64)) - np.log2(x.astype(np.float64))
    # The image's error reaches x undivided by k, as does one of FP32 in decoding.
    slack = LOG2_ERROR + 2.0**-17
    assert np.all(log2_change <= up / k + slack)
    assert np.all(log2_change >= -down / k - slack)


@everywhere
@given(regimes=regimes, seed=seeds)
def test_the_group_fills_the_format(case, regimes, seed):
    """k is the largest sixteenth that keeps the smallest element in the format or above its bottom.

    To 1/64 of a sixteenth, `expansion.TOLERANCE`: in binades, of which there are R / k, 1/1024
    of them, and what the logarithms leave.
    """
    x = hostile(regimes, seed, case.shape, case.group_size)
    e, _ = round_trip(x, case, seed)
    fmt = format_of(case.dtype)
    assert e.k16.dtype == np.uint8
    bottom, least = (fmt.tiny * 2**HEADROOM, 8) if case.stochastic else (fmt.tiny, 16)
    assert np.all(e.k16 >= least)
    image, k, _ = exact_image(x, e, case)
    under = 2 ** (-fmt.log2_range / k / 1024 - k * LOG2_ERROR)
    assert np.all((image >= bottom * under) | (x == 0) | (k == least / 16))
    finer = exact_image(x, e._replace(k16=e.k16.astype(np.int64) + 1), case)[0]
    finer = np.where(x == 0, np.inf, finer)
    columns = finer.shape[-1] if finer.ndim else 1
    starts = np.arange(0, columns, case.group_size)
    smallest = np.minimum.reduceat(np.atleast_1d(finer), starts, axis=-1) if columns else finer
    could_grow = (np.atleast_1d(e.k16) < 255) & (np.atleast_1d(e.amax) > 0)
    assert np.all(smallest[could_grow] <= bottom * 2 ** (16 * LOG2_ERROR))


@pytest.mark.parametrize("case", [case for case in CASES if case.group_size >= 64], ids=str)
def test_zero_at_any_place_of_a_group_changes_nothing(case):
    """One zero among constants, and one non-zero among zeros, at every place."""
    one_place = np.eye(case.group_size, dtype=np.float32)
    if case.shape[-1:] < (case.group_size,):
        one_place = one_place[:, : case.shape[-1] if case.shape else 1]
    for groups in (np.float32(3e-30) * (1 - one_place), np.float32(-0.3) * one_place):
        count = max(1, int(np.prod(case.shape)) // groups.shape[-1])
        for start in range(0, len(groups), count):
            some = np.resize(groups[start : start + count], case.shape)
            np.testing.assert_array_equal(round_trip(some, case, start)[1], some)


@formats
@roundings
def test_magnitudes_under_the_smallest_count_as_zero(dtype, stochastic):
    case = Case(*PLAIN, dtype, stochastic)
    under = np.nextafter(np.float32(SMALLEST), np.float32(0))
    x = np.resize(np.array([under, -(2.0**-127), 1e-40, -1e-45], np.float32), case.shape)
    x[2:, ::64] = -7.0
    e, y = round_trip(x, case)
    np.testing.assert_array_equal(y, np.where(x == -7, x, 0))
    np.testing.assert_array_equal(e.amax, [[0] * 4] * 2 + [[7] * 4] * 2)
    np.testing.assert_array_equal(e.k16, [[8 if stochastic else 16] * 4] * 2 + [[255] * 4] * 2)


@formats
@pytest.mark.parametrize("k16", [16, 17, 18, 24, 32, 48, 85, 163, 254, 255])
def test_every_code_survives_another_round_trip(dtype, k16):
    """A group that holds all codes decodes to values whose code is the same, with the same k."""
    table = positive_values(dtype)
    codes = np.zeros((16, 256), np.float32)
    codes[:, : len(table)] = table
    codes[:, 128 : 128 + len(table)] = -table
    # Of any size: the logarithms round differently for each.
    amax = np.geomspace(2.0**-90, FLOAT32_MAX, 16, dtype=np.float32)[:, None]
    stored = Expanded(codes.astype(dtype), amax, np.full((16, 1), k16, np.uint8))
    again = encode(decode(stored, group_size=256), dtype, group_size=256)
    np.testing.assert_array_equal(again.k16, stored.k16)
    np.testing.assert_array_equal(again.amax, amax)
    np.testing.assert_array_equal(np.asarray(again.codes).astype(np.float32), codes)


@formats
def test_round_trips_settle_at_the_third(dtype):
    """Decoding and encoding over and over, as an optimizer does, must not move anything.

    The first trip may round the smallest elements to zero. The second may then choose a larger k,
    and again where none of a group got the smallest code. After it one has, so k stays the same.
    """
    rng = np.random.default_rng(0)
    spread = np.exp2(rng.uniform(-4, 6, (512, 1)))
    place = rng.random((512, 128))
    place[:, :2] = 0, 1
    x = np.exp2(np.maximum(rng.uniform(-60, 100, (512, 1)) - spread * place, -120))

    def once(_, x):
        return expansion.decode(expansion.encode(x, dtype))

    trips = jax.jit(lambda x, count: jax.lax.fori_loop(0, count, once, x))
    few, many = (np.asarray(trips(np.float32(x), count)) for count in (3, 100))
    group = np.argmax(np.abs(many - few).max(-1))
    np.testing.assert_array_equal(many, few, err_msg=f"spread {spread[group]} binades")


@functools.cache
def drawn(rounding, dtype, shape, count):
    """The program that rounds an array at random with each of `count` keys, and decodes it."""

    def samples(x, step):
        u = noise.uniform(noise.leaf_key(0, step, 0), shape, run=128)
        e = rounding(x, dtype, noise=u)
        return expansion.decode(e), e.k16, e.codes.astype(jnp.float32)

    program = jax.jit(jax.vmap(samples, (None, 0)))
    return lambda x: map(np.asarray, program(x, np.arange(count)))


@formats
@pytest.mark.parametrize("spread", [0.5, 3.0, 10.0, 40.0, 60.0])
def test_stochastic_rounding_is_right_on_average(dtype, spread):
    """The mean of x itself over many keys, each element and all of them together."""
    count, shape = 2048, (4, 128)
    rng = np.random.default_rng(0)
    place = rng.random(shape)
    place[:, :2] = 0, 1
    x = np.float32(np.exp2(-spread * place))

    many, k16, _ = drawn(expansion.encode, dtype, shape, count)(x)
    case = Case(shape, 128, dtype, True)
    stored = Expanded(None, x.max(-1, keepdims=True), k16[0])
    image, k, fmt = exact_image(x, stored, case)
    low, high = (round_exactly(image, dtype, place) for place in ("down", "up"))
    gap = high ** (1 / k) - low ** (1 / k)
    drift = many.astype(np.float64).mean(0) / x * image ** (1 / k) - image ** (1 / k)
    # `formats.stochastic_cast` is right to 0.4 % at worst, where the code is n = 1 in units
    # of its last place, and better with n^2; below that exactly, but for the noise's resolution.
    code, normal = np.searchsorted(positive_values(dtype), low), 2**fmt.mantissa_bits
    n = np.where(code < normal, code, normal + code % normal)
    allowed = np.where(n > 0, 0.004 / np.maximum(n, 1) ** 2 * image ** (1 / k), 0) + 2.0**-16 * gap
    # A mean of `count` results has a standard deviation of at most half the gap over
    # sqrt(count); beyond six of them lies one in 5e8.
    deviation = gap / 2 / np.sqrt(count)
    assert np.all(np.abs(drift) <= allowed + 6 * deviation)
    total = allowed.mean() + 6 * np.sqrt(np.mean(deviation**2) / x.size)
    assert abs(drift.mean()) <= total


@formats
@pytest.mark.parametrize("spread", [3.0, 10.0, 17.0, 30.0])
def test_dithered_rounding_is_right_on_average_below_the_normal_codes(dtype, spread):
    """To 1.4 %, and exactly below the smallest code; above, to nearest within half a code more."""
    count, shape = 2048, (4, 128)
    rng = np.random.default_rng(0)
    place = rng.random(shape)
    place[:, :2] = 0, 1
    x = np.float32(np.exp2(-spread * place) * rng.choice([-1, 1], shape))

    many, k16, codes = drawn(expansion.encode_dithered, dtype, shape, count)(x)
    stored = Expanded(None, np.abs(x).max(-1, keepdims=True), k16[0])
    image, k, fmt = exact_image(x, stored, Case(shape, 128, dtype, False))
    low, high = (round_exactly(image, dtype, place) for place in ("down", "up"))
    gap = (high ** (1 / k) - low ** (1 / k)) / fmt.max ** (1 / k)
    drift = many.astype(np.float64).mean(0) * np.sign(x) - np.abs(x)
    subnormal = image < 2.0**fmt.min_exponent
    below = image < fmt.tiny
    allowed = np.where(below, 2.0**-16 * gap, 0.015 * np.abs(x)) + 6 * gap / 2 / np.sqrt(count)
    assert np.all(np.abs(drift)[subnormal] <= allowed[subnormal] + 1e-6 * np.abs(x)[subnormal])
    assert np.all(codes * np.sign(x) >= 0)
    # Noise of half the smallest code moves a normal code by as much before it is rounded.
    widened = np.maximum(image - fmt.tiny / 2, 0), image + fmt.tiny / 2
    slack = 2 ** (k * LOG2_ERROR)
    assert np.all(np.abs(codes) >= round_exactly(widened[0] / slack, dtype, "nearest"))
    assert np.all(np.abs(codes) <= round_exactly(widened[1] * slack, dtype, "nearest"))


@pytest.mark.costly
@formats
@given(regimes=regimes, seed=seeds)
def test_dithered_rounding_keeps_zero_and_the_largest_and_is_finite(dtype, regimes, seed):
    for shape, group_size in MENU:
        x = hostile(regimes, seed, shape, group_size)
        u = hostile_noise(seed, shape)
        e = encode_dithered(x, dtype, u, group_size=group_size)
        y = np.asarray(decode(e, group_size=group_size))
        amax = per_element(np.asarray(e.amax), shape, group_size)
        largest = np.abs(x) == amax
        np.testing.assert_array_equal(y[largest], x[largest])
        assert np.all(y[x == 0] == 0)
        for part in (*e, y):
            assert np.all(np.isfinite(np.asarray(part, np.float32)))
