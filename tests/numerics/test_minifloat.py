"""Laws of small floats. Oracles: ml_dtypes for the formats that it has, tables for all others."""

import contextlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

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


def any_formats(count):
    """Formats of every kind, drawn from all that can be made."""
    rng = np.random.default_rng(0)
    while count:
        exponent_bits, mantissa_bits, signed, subnormals, zero = rng.integers((9, 11, 2, 2, 2))
        subnormals = bool(subnormals or exponent_bits == 0)
        with contextlib.suppress(ValueError):
            yield Minifloat(
                int(exponent_bits),
                int(mantissa_bits),
                signed=bool(signed),
                subnormals=subnormals,
                zero=bool(zero or subnormals),
                specials=str(rng.choice(["none", "nan", "ieee", "fnuz"])),
                bias=None if rng.random() < 0.5 else int(rng.integers(-8, 141)),
            )
            count -= 1


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
def test_numbers_are_rounded_as_ml_dtypes_casts_them(name, dtype):
    fmt = minifloat(name)
    x = numbers_around(fmt)
    x = np.clip(x, -fmt.max, fmt.max)  # a plain cast does not saturate
    expected = x.astype(dtype)
    seen = np.abs(expected.astype(np.float32)) >= SMALLEST_NORMAL
    seen |= expected.astype(np.float32) == 0
    rounded = np.asarray(fmt.round(x))
    np.testing.assert_array_equal(rounded[seen], expected.astype(np.float32)[seen])


@named
def test_a_format_is_found_by_its_name_and_knows_its_limits(name):
    fmt = minifloat(name)
    assert fmt.name == name
    assert minifloat(name.lower()) == fmt
    assert (np.diff(fmt.magnitudes) > 0).all()
    assert fmt.max == fmt.magnitudes[-1]
    assert fmt.tiny == fmt.magnitudes[fmt.magnitudes > 0][0]
    assert fmt.full_scale == min(fmt.max, fmt.full_scale) < 2**16


@named
def test_every_value_is_its_own_rounding(name):
    """Infinity saturates, and NaN stays."""
    fmt = minifloat(name)
    values = fmt.values[np.isfinite(fmt.values) & (normal(fmt.values) == fmt.values)]
    values = np.resize(values.astype(np.float32), COUNT)
    np.testing.assert_array_equal(fmt.round(values), values)
    rounded = np.asarray(fmt.round(np.resize(np.float32([np.inf, np.nan]), COUNT)))
    assert rounded[0] == fmt.max
    assert np.isnan(rounded[1])


def test_rounding_takes_the_values_of_the_table():
    """The nearest, in the order of the numbers, and of either sign."""
    for fmt in any_formats(30):
        x = numbers_around(fmt)
        below, above, share = by_table(x, fmt)
        visible = normal(below) == below
        signed = np.asarray(fmt.round(x), np.float64)
        nearest_ones = np.where(share > 0.5, above, below)
        clear = visible & (normal(nearest_ones) == nearest_ones)
        rounded, ties = np.abs(signed), share == 0.5
        np.testing.assert_array_equal(rounded[clear & ~ties], nearest_ones[clear & ~ties])
        assert ((rounded == below) | (rounded == above))[clear & ties].all(), fmt
        assert (np.diff(signed[np.argsort(x)]) >= 0).all() or not fmt.zero, fmt
        negative = np.asarray(fmt.round(-np.abs(x)))
        if fmt.signed:
            np.testing.assert_array_equal(negative, -np.abs(signed))
        elif fmt.zero:
            assert (negative == 0).all(), fmt


def test_stochastic_rounding_is_right_on_average():
    """Over an even grid of noise the mean is known to half a step of the grid."""
    noise = np.float32((np.arange(64) + 0.5) / 64)[:, None] + np.zeros(256, np.float32)
    for fmt in any_formats(20):
        x = numbers_around(fmt)[:256]
        below, above, share = by_table(x, fmt)
        rounded = fmt.round(np.broadcast_to(x, noise.shape), noise)
        mean = np.abs(np.asarray(rounded, np.float64).mean(axis=0))
        visible = (normal(below) == below) & (normal(above) == above)
        error = np.abs(mean - (below + share * (above - below)))
        assert (error <= 0.51 / 64 * (above - below) + 1e-6 * above)[visible].all(), fmt


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_the_formats_of_training_are_two_of_these(dtype):
    own, fmt = format_of(dtype), minifloat(format_of(dtype).name)
    x = np.random.default_rng(0).standard_normal(4096) * np.exp2(np.linspace(-20, 10, 4096))
    both = jax.jit(lambda x: (fmt.round(x), nearest(x, dtype)))
    np.testing.assert_array_equal(*both(x.astype(np.float32)))
    assert (fmt.max, fmt.tiny, fmt.min_exponent) == (own.max, own.tiny, own.min_exponent)


def test_the_gradient_is_that_of_a_cast():
    fmt, noise = minifloat("E2M1"), jnp.full(3, 0.5)

    def loss(x):
        return jnp.sum(fmt.round(x) + 2 * fmt.round(x, noise))

    gradient = jax.jit(jax.grad(loss))(jnp.array([0.1, 1.3, 100.0]))
    np.testing.assert_array_equal(gradient, 3.0)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"exponent_bits": 9}, "exponent_bits=9 must be .* from 0 to 8"),
        ({"mantissa_bits": 16}, "mantissa_bits=16 must be .* from 0 to 15"),
        ({"mantissa_bits": True}, "mantissa_bits=True must be"),
        ({"exponent_bits": 0, "mantissa_bits": 0}, "E0M0 has no code for any number but zero"),
        ({"exponent_bits": 1, "mantissa_bits": 0, "specials": "ieee"}, "no code for any number"),
        ({"exponent_bits": 0, "subnormals": False}, "Without exponent bits"),
        ({"exponent_bits": 0, "specials": "ieee"}, "Without exponent bits .* none are infinite"),
        ({"zero": False}, "zero=False needs subnormals=False"),
        ({"signed": False, "specials": "fnuz"}, "needs signed=True"),
        ({"specials": "inf"}, "specials='inf' must be 'none' or 'nan' or"),
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
