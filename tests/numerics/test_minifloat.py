"""Laws of small floats. Oracles: ml_dtypes for the formats that it has, tables for all others."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coat_jax.numerics.formats import E4M3, E5M2, format_of, nearest
from coat_jax.numerics.minifloat import Minifloat, minifloat

SMALLEST_NORMAL = 2.0**-126  # of FP32: smaller numbers are flushed
FLOAT32_MAX = float(np.finfo(np.float32).max)
COUNT = 2048  # numbers that are rounded
OF_ML_DTYPES = {
    "E2M1": ml_dtypes.float4_e2m1fn,
    "E2M3": ml_dtypes.float6_e2m3fn,
    "E3M2": ml_dtypes.float6_e3m2fn,
    "E3M4:ieee": ml_dtypes.float8_e3m4,
    "E4M3": ml_dtypes.float8_e4m3fn,
    "E4M3:ieee": ml_dtypes.float8_e4m3,
    "E4M3:fnuz:bias=8": ml_dtypes.float8_e4m3fnuz,
    "E4M3:fnuz:bias=11": ml_dtypes.float8_e4m3b11fnuz,
    "E5M2": ml_dtypes.float8_e5m2,
    "E5M2:fnuz:bias=16": ml_dtypes.float8_e5m2fnuz,
    "UE8M0": ml_dtypes.float8_e8m0fnu,
    "E8M7": ml_dtypes.bfloat16,
    "E5M10": np.float16,
}
OTHERS = (
    "E0M3", "E0M7", "UE0M8", "E1M6", "E2M5", "E3M0", "E4M0", "E4M3:none", "E3M4:no_subnormals",
    "E5M0:no_subnormals", "UE4M4", "UE5M3:no_subnormals:no_zero", "E6M1:bias=40", "E7M10", "E8M3",
    "E3M3:bias=-9", "E1M0", "E3M2:nan",
)  # fmt: skip
named = pytest.mark.parametrize("name", [*OF_ML_DTYPES, *OTHERS])
of_ml_dtypes = pytest.mark.parametrize(("name", "dtype"), OF_ML_DTYPES.items())


@st.composite
def formats(draw):
    """Any format that can be made."""
    exponent_bits, mantissa_bits = draw(st.integers(0, 8)), draw(st.integers(0, 10))
    subnormals = exponent_bits == 0 or draw(st.booleans())
    try:
        return Minifloat(
            exponent_bits,
            mantissa_bits,
            signed=draw(st.booleans()),
            subnormals=subnormals,
            zero=subnormals or draw(st.booleans()),
            specials=draw(st.sampled_from(["none", "nan", "ieee", "fnuz"])),
            bias=draw(st.none() | st.integers(-8, 140)),
        )
    except ValueError:
        return minifloat("E3M4")


def numbers_around(fmt):
    """Values, the middles between them and their neighbours in FP32, and larger numbers.

    Always as many, so that programs are compiled once for all formats.
    """
    values = fmt.magnitudes
    middles = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    beyond = np.minimum(fmt.max * np.array([1.0, 1.01, 1.5]), FLOAT32_MAX)
    beside = [np.nextafter(middles, np.float32(end)) for end in (FLOAT32_MAX, 0)]
    x = np.concatenate([values, middles, *beside, beyond, [0.0]]).astype(np.float32)
    x = np.concatenate([x, -x]) if fmt.signed else x
    x = x[(np.abs(x) >= SMALLEST_NORMAL) | (x == 0)]
    few = np.concatenate([x[:COUNT], np.random.default_rng(0).choice(x, COUNT)])
    return few[:COUNT] if len(x) <= COUNT else few[-COUNT:]


def by_table(x, fmt):
    """The values below and above each magnitude, and where it is between them."""
    table = fmt.magnitudes
    magnitude = np.clip(np.abs(x).astype(np.float64), table[0], table[-1])
    place = np.clip(np.searchsorted(table, magnitude), min(1, len(table) - 1), len(table) - 1)
    below, above = table[np.maximum(place - 1, 0)], table[place]
    return below, above, np.where(above > below, (magnitude - below) / (above - below), 1.0)


def normal(values):
    """With what FP32 flushes as zero."""
    return np.where(np.abs(values) < SMALLEST_NORMAL, 0.0, values)


@of_ml_dtypes
def test_every_code_means_what_ml_dtypes_says(name, dtype):
    fmt = minifloat(name)
    codes = np.arange(1 << fmt.bits, dtype=np.uint8 if fmt.bits <= 8 else np.uint16)
    with np.errstate(invalid="ignore"):
        expected = codes.view(dtype).astype(np.float64)
    np.testing.assert_array_equal(fmt.values, expected)


@of_ml_dtypes
def test_numbers_are_rounded_and_encoded_as_ml_dtypes_casts_them(name, dtype):
    fmt = minifloat(name)
    x = numbers_around(fmt)
    x = np.clip(x, -fmt.max, fmt.max)  # a plain cast does not saturate
    expected = x.astype(dtype)
    seen = np.abs(expected.astype(np.float32)) >= SMALLEST_NORMAL
    seen |= expected.astype(np.float32) == 0
    rounded = np.asarray(fmt.round(x))
    np.testing.assert_array_equal(rounded[seen], expected.astype(np.float32)[seen])
    codes = np.asarray(fmt.encode(x))
    np.testing.assert_array_equal(codes[seen], expected.view(codes.dtype)[seen])


@named
def test_every_value_is_its_own_rounding(name):
    fmt = minifloat(name)
    finite = np.resize(normal(fmt.values[np.isfinite(fmt.values)]), COUNT)
    for mode in ("nearest", "truncate"):
        np.testing.assert_array_equal(fmt.round(finite.astype(np.float32), mode), finite)


@named
def test_codes_are_decoded_to_what_was_encoded(name):
    fmt = minifloat(name)
    codes = np.flatnonzero(np.isfinite(fmt.values) & (normal(fmt.values) == fmt.values))
    codes = np.resize(codes, COUNT)
    values = fmt.decode(codes)
    np.testing.assert_array_equal(values, fmt.values[codes].astype(np.float32))
    np.testing.assert_array_equal(fmt.encode(values), codes)


@named
def test_a_format_is_found_by_its_name(name):
    assert minifloat(name).name == name
    assert minifloat(name.lower()) == minifloat(name)


@named
def test_magnitudes_ascend_and_limits_are_theirs(name):
    fmt = minifloat(name)
    assert (np.diff(fmt.magnitudes) > 0).all()
    assert fmt.max == fmt.magnitudes[-1]
    assert fmt.tiny == fmt.magnitudes[fmt.magnitudes > 0][0]
    assert fmt.full_scale == min(fmt.max, fmt.full_scale) < 2**16


@settings(deadline=None, max_examples=30)
@given(formats())
def test_nearest_is_the_nearest_of_the_table(fmt):
    x = numbers_around(fmt)
    below, above, share = by_table(x, fmt)
    rounded = np.abs(np.asarray(fmt.round(x), np.float64))
    nearest_ones = np.where(share > 0.5, above, below)
    ties = share == 0.5
    visible = (normal(nearest_ones) == nearest_ones) & (normal(below) == below)
    clear = visible & ~ties
    np.testing.assert_array_equal(rounded[clear], nearest_ones[clear])
    assert ((rounded == below) | (rounded == above))[visible & ties].all()


@settings(deadline=None, max_examples=20)
@given(formats())
def test_truncation_takes_the_value_towards_zero(fmt):
    x = numbers_around(fmt)
    below, above, share = by_table(x, fmt)
    expected = np.where(share == 1, above, below)
    visible = (normal(expected) == expected) & (normal(below) == below)
    rounded = np.abs(np.asarray(fmt.round(x, "truncate")))
    np.testing.assert_array_equal(rounded[visible], expected[visible])


@settings(deadline=None, max_examples=20)
@given(formats())
def test_stochastic_rounding_is_right_on_average(fmt):
    """Over an even grid of noise the mean is known to half a step of the grid."""
    x = numbers_around(fmt)[:256]
    below, above, share = by_table(x, fmt)
    noise = np.float32((np.arange(64) + 0.5) / 64)[:, None] + np.zeros(x.shape, np.float32)
    rounded = fmt.round(np.broadcast_to(x, noise.shape), "stochastic", noise)
    mean = np.abs(np.asarray(rounded, np.float64).mean(axis=0))
    visible = (normal(below) == below) & (normal(above) == above)
    error = np.abs(mean - (below + share * (above - below)))
    assert (error <= 0.51 / 64 * (above - below) + 1e-6 * above)[visible].all()


@settings(deadline=None, max_examples=20)
@given(formats(), st.integers(0, 2**32 - 1))
def test_rounding_is_monotone_and_odd(fmt, seed):
    x = np.random.default_rng(seed).normal(size=COUNT) * fmt.max
    x = np.sort(np.clip(x, -FLOAT32_MAX, FLOAT32_MAX).astype(np.float32))
    rounded = np.asarray(fmt.round(x))
    assert (np.diff(rounded) >= 0).all() or not fmt.zero
    if fmt.signed:
        np.testing.assert_array_equal(fmt.round(-x), -rounded)
    elif fmt.zero:
        assert (rounded[x < 0] == 0).all()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_the_formats_of_training_are_two_of_these(dtype):
    """The package's own rounding to FP8 is the one of these formats."""
    fmt = minifloat(format_of(dtype).name)
    x = np.random.default_rng(0).standard_normal(4096) * np.exp2(np.linspace(-20, 10, 4096))
    x = x.astype(np.float32)
    np.testing.assert_array_equal(fmt.round(x), nearest(x, dtype))
    own = format_of(dtype)
    assert (fmt.max, fmt.tiny, fmt.min_exponent) == (own.max, own.tiny, own.min_exponent)


@named
def test_infinity_saturates_and_nan_stays(name):
    fmt = minifloat(name)
    rounded = np.asarray(fmt.round(np.resize(np.float32([np.inf, 1e38, np.nan]), COUNT)))
    assert rounded[0] == fmt.max
    assert rounded[1] == min(fmt.max, float(fmt.round(np.full(COUNT, np.float32(1e38)))[0]))
    assert np.isnan(rounded[2])
    if np.isnan(fmt.values).any():
        assert np.isnan(fmt.decode(fmt.encode(np.full(COUNT, np.float32(np.nan))))).all()


def test_the_gradient_is_that_of_a_cast():
    fmt, x = minifloat("E2M1"), jnp.array([0.1, 1.3, 100.0])
    np.testing.assert_array_equal(jax.grad(lambda x: fmt.round(x).sum())(x), 1.0)
    noise = jnp.full(3, 0.5)
    gradient = jax.grad(lambda x: fmt.round(x, "stochastic", noise).sum())
    np.testing.assert_array_equal(jax.jit(gradient)(x), 1.0)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"exponent_bits": 9}, "exponent_bits=9 must be .* from 0 to 8"),
        ({"mantissa_bits": 11}, "mantissa_bits=11 must be .* from 0 to 10"),
        ({"mantissa_bits": True}, "mantissa_bits=True must be"),
        ({"exponent_bits": 0, "mantissa_bits": 0}, "E0M0 has no code for any number but zero"),
        ({"exponent_bits": 1, "mantissa_bits": 0, "specials": "ieee"}, "no code for any number"),
        ({"exponent_bits": 0, "subnormals": False}, "Without exponent bits"),
        ({"exponent_bits": 0, "specials": "ieee"}, "needs an exponent field"),
        ({"zero": False}, "zero=False needs subnormals=False"),
        ({"signed": False, "specials": "fnuz"}, "needs signed=True"),
        ({"specials": "inf"}, "specials='inf' must be one of none, nan, ieee, fnuz"),
        ({"bias": 1.5}, "bias=1.5 must be a whole number"),
        ({"bias": 200}, "bias=200 spans .* beyond FP32"),
        ({"exponent_bits": 8}, "beyond FP32.*ieee"),
    ],
)
def test_impossible_formats_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        Minifloat(**{"exponent_bits": 4, "mantissa_bits": 3} | settings)


@pytest.mark.parametrize("name", ["", "FP8", "E4", "E9M1", "E4M3:odd", "E4M3:bias=x", None, 8])
def test_unknown_names_are_refused(name):
    with pytest.raises(ValueError, match=r"E4M3|none of|from 0 to 8"):
        minifloat(name)


def test_noise_comes_with_stochastic_rounding_only():
    fmt, x = minifloat("E4M3"), jnp.ones(2)
    with pytest.raises(ValueError, match="without noise"):
        fmt.round(x, "stochastic")
    with pytest.raises(ValueError, match="with noise"):
        fmt.round(x, "nearest", x)
    with pytest.raises(ValueError, match="must be one of nearest, stochastic, truncate"):
        fmt.round(x, "up")
