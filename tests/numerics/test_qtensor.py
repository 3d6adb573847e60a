"""Laws of linear FP8 quantization, codes * scale with scale = max|group| / FP8 max.

The scale is one FP32 division, a code one division and one cast, decoding one product, and
XLA may divide by multiplying with the reciprocal. Each is within 2^-23 of the exact result,
so that FP32 adds less than FLOAT32_ERROR = 2^-20 to the rounding of the format:

    normal codes     half a last place: 2^-4 of the value (E4M3), 2^-3 (E5M2)
    subnormal codes  half of the smallest code, times the scale

XLA flushes denormals, so a scale under 2^-126 is zero and with it its whole group.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expansion_cases import DRAWS, FLOAT32_MAX, SHAPES, formats, hostile, per_element

from coat_jax.numerics import qtensor
from coat_jax.numerics.formats import E4M3, E5M2, format_of

FLOAT32_ERROR = 2.0**-20
LEAST_SCALE = 2.0**-126

everywhere = pytest.mark.parametrize(
    "case", [(*case, E4M3) for case in SHAPES] + [(*SHAPES[-1], E5M2)], ids=str
)


@functools.partial(jax.jit, static_argnames=("dtype", "group_size"))
def both(x, dtype, group_size):
    q = qtensor.quantize(x, dtype, group_size=group_size)
    return q, qtensor.dequantize(q)


def round_trip(x, case):
    """The codes, and per element the scale and the decoded value, in FP64."""
    _, group_size, dtype = case
    q, y = both(np.float32(x), dtype, group_size)
    scale = per_element(np.asarray(q.scale), x.shape, group_size)
    return (np.asarray(a).astype(np.float64) for a in (q.codes, scale, y))


def drawn(case):
    return [hostile(seed, *case[:2]) for seed in range(DRAWS)]


@everywhere
def test_the_error_is_half_a_last_place_and_zero_and_the_largest_are_exact(case):
    fmt = format_of(case[2])
    for x in map(np.float64, drawn(case)):
        codes, scale, y = round_trip(x, case)
        assert y.shape == codes.shape == x.shape
        assert np.all(codes[x == 0] == 0)
        bound = np.maximum(2.0 ** -(fmt.mantissa_bits + 1) * np.abs(x), fmt.tiny / 2 * scale)
        # A product under 2^-126 is flushed.
        slack = FLOAT32_ERROR * np.abs(x) + LEAST_SCALE
        assert np.all((np.abs(y - x) <= bound + slack) | (scale == 0))
        for part in (codes, scale, y):
            assert np.all(np.isfinite(part))
        # The largest is where |x| = limit * scale, up to the rounding of the scale.
        largest = (np.abs(x) >= fmt.max * scale * (1 - FLOAT32_ERROR)) & (scale > 0)
        np.testing.assert_array_equal(np.abs(codes)[largest], fmt.max)
        np.testing.assert_allclose(y[largest], x[largest], rtol=FLOAT32_ERROR)
        groups = qtensor.split_groups(np.float32(largest | (scale == 0)), case[1])
        assert np.all(np.max(groups, axis=-1, initial=0) == 1)


@everywhere
def test_nan_stays_in_its_own_place_and_infinity_is_the_largest_float32(case):
    for seed, x in enumerate(drawn(case)):
        some = np.random.default_rng(seed).random(x.shape) < 0.2
        codes, scale, y = round_trip(np.where(some, np.nan, x), case)
        without, same_scale, same = round_trip(np.where(some, 0, x), case)
        np.testing.assert_array_equal(scale, same_scale)
        np.testing.assert_array_equal(codes, np.where(some, np.nan, without))
        np.testing.assert_array_equal(y, np.where(some, np.nan, same))
        got, want = (
            round_trip(np.where(some, np.copysign(large, x), x), case)
            for large in (np.inf, FLOAT32_MAX)
        )
        for part, expected in zip(got, want, strict=True):
            np.testing.assert_array_equal(part, expected)


@formats
def test_the_largest_floats_decode_to_finite_ones(dtype):
    """Rounding of the scale must not take them over the edge: all of the last 65536."""
    last = np.float32(FLOAT32_MAX).view(np.uint32)
    x = np.arange(last - 2**16 + 1, last + 1, dtype=np.uint32).view(np.float32)[:, None]
    *_, y = round_trip(x, (x.shape, 16, dtype))
    np.testing.assert_allclose(y, x, rtol=FLOAT32_ERROR)


@formats
def test_values_of_the_format_are_exact(dtype):
    """With a scale that is a power of two, quantizing what was dequantized is the identity."""
    with np.errstate(invalid="ignore"):
        values = np.arange(256, dtype=np.uint8).view(jnp.dtype(dtype)).astype(np.float32)
    values = values[np.isfinite(values)] * np.float32(2**-10)
    *_, y = round_trip(values, (values.shape, 256, dtype))
    np.testing.assert_array_equal(y, values)
