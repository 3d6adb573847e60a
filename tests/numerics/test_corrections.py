"""Laws of BF16 numbers with corrections: together they are FP32 numbers rounded to 24 bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick

from coat_jax.numerics import corrections

# Of millions of numbers.
join = jax.jit(corrections.join, compiler_options=quick.OPTIMIZED)
SMALLEST = 2.0**-126  # the smallest normal number; XLA may flush what is below
SPECIAL = [0.0, 1.0, 2.0, 0.5, 1 - 2.0**-9, 1 + 2.0**-8, 1 - 2.0**-24, 2 - 2.0**-23, SMALLEST]
SPECIAL += [3.3895314e38, float(np.finfo(np.float32).max), np.inf, np.nan]


@functools.partial(jax.jit, compiler_options=quick.OPTIMIZED)
def split(x, dither=128):
    return corrections.split(x, jnp.uint32(dither))


def of_bits(bits):
    return np.asarray(bits, np.uint32).view(np.float32)


def numbers(count=1 << 18):
    """FP32 numbers of any sign and exponent, beginning with special ones and their opposites."""
    bits = np.random.default_rng(0).integers(0, 2**32, count, dtype=np.uint32)
    special = np.array(SPECIAL, np.float32)
    x = np.concatenate([special, -special, of_bits(bits)])
    return x[~((np.abs(x) < SMALLEST) & (x != 0))]


def place(x):
    """The distance of neighbouring 24-bit numbers around x: 2^-15 of its power of two."""
    return np.exp2(np.floor(np.log2(np.abs(x, dtype=np.float64))) - 15)


def in_fp64(x):
    return np.asarray(x, np.float32).astype(np.float64)


def test_every_number_of_24_bits_is_split_and_joined_exactly():
    patterns = np.arange(2**24, dtype=np.uint32)
    magnitudes = patterns & 0x7FFFFF
    # Below 2^-134 they are zero; above infinity they are NaN.
    exact = patterns[(magnitudes >= 128) & (magnitudes <= 0x7F8000)] << 8
    joined = join(*split(of_bits(exact)))
    np.testing.assert_array_equal(np.asarray(joined).view(np.uint32), exact)


def test_every_pair_but_a_zero_with_a_correction_is_joined_and_split_exactly():
    bits = np.arange(1, 0x7F80, dtype=np.uint16)  # up to the largest finite number
    value = np.concatenate([bits, bits | 0x8000]).view(jnp.bfloat16)[:, None]
    correction = np.arange(-128, 128, dtype=np.int8)[None]
    pair = [np.ascontiguousarray(a) for a in np.broadcast_arrays(value, correction)]
    for got, wanted in zip(split(join(*pair)), pair, strict=True):
        np.testing.assert_array_equal(np.asarray(got).view(np.uint8), wanted.view(np.uint8))


def test_the_value_is_the_nearest_of_bf16_and_of_two_that_further_from_zero():
    x = of_bits(np.arange(2**24, dtype=np.uint32) << 8)
    x = x[np.isfinite(x) & (np.abs(x) >= SMALLEST)]
    value = split(x)[0]
    to_even = jnp.asarray(x).astype(jnp.bfloat16)
    tie = (x.view(np.uint32) & 0xFFFF) == 0x8000
    np.testing.assert_array_equal(np.asarray(value)[~tie], np.asarray(to_even)[~tie])
    assert np.all(np.abs(in_fp64(value[tie])) > np.abs(in_fp64(x[tie])))
    assert tie.mean() == pytest.approx(1 / 256, rel=1e-3)


def test_corrections_count_places_of_the_joined_number():
    """Those of its own binade, which may be the one below the value's."""
    x = numbers()
    x = x[np.isfinite(x) & (np.abs(x) > SMALLEST) & (np.abs(x) < 2.0**127)]
    value, correction = split(x)
    joined = in_fp64(join(value, correction))
    counted = (np.abs(joined) - np.abs(in_fp64(value))) / place(joined)
    np.testing.assert_array_equal(np.asarray(correction, np.float64), counted)
    below = np.abs(in_fp64(value)) > np.exp2(np.floor(np.log2(np.abs(joined))) + 1) * (1 - 1e-9)
    assert below.sum() > 100  # so that the case is among them


def test_bf16_numbers_need_no_correction_and_a_zero_is_zero_with_any():
    x = np.arange(2**16, dtype=np.uint16).view(jnp.bfloat16)
    x = x[~np.isnan(x.astype(np.float32))]
    value, correction = split(join(x, np.zeros(x.shape, np.int8)))
    np.testing.assert_array_equal(np.asarray(value).view(np.uint16), x.view(np.uint16))
    assert not np.any(correction)
    every = np.arange(-128, 128, dtype=np.int8)
    for zero, bits in ((0.0, 0), (-0.0, 0x80000000)):
        joined = join(np.full(256, zero, jnp.bfloat16), every)
        assert set(np.asarray(joined).view(np.uint32)) == {bits}


def test_opposite_numbers_have_opposite_values_and_the_same_correction():
    x = numbers()
    value, correction = split(x)
    opposite, same = split(-x)
    np.testing.assert_array_equal(np.asarray(same), np.asarray(correction))
    np.testing.assert_array_equal(in_fp64(opposite), -in_fp64(value))


def test_nan_and_infinity_stay():
    """A NaN with any correction, if it is a quiet one: arithmetic makes no others."""
    bits = [0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFFC00000, 0x7FC00000]
    infinite = np.float32([np.inf, -np.inf])
    for dither in (0, 255):
        np.testing.assert_array_equal(join(*split(infinite, dither)), infinite)
        value, correction = split(of_bits(bits), dither)
        assert np.all(np.isnan(value.astype(jnp.float32)))
        assert np.all(np.isnan(join(value, correction)))
    nans = np.arange(0x7FC0, 0x8000, dtype=np.uint16)
    nans = np.concatenate([nans, nans | 0x8000]).view(jnp.bfloat16)
    every = np.arange(-128, 128, dtype=np.int8)
    assert np.all(np.isnan(join(nans[:, None], every[None])))


def test_dithered_numbers_are_right_on_average():
    """Over all 256 values of the dither the mean is the number, exactly."""
    x = numbers(1 << 12)
    x = x[np.isfinite(x) & (np.abs(x) < 2.0**127)]
    every = np.arange(256, dtype=np.uint32)[:, None]
    joined = in_fp64(join(*split(np.broadcast_to(x, (256, x.size)), every)))
    np.testing.assert_array_equal(joined.mean(axis=0), x.astype(np.float64))


def test_both_have_the_derivative_of_a_cast():
    x = jnp.asarray([1.0, -3.3, 1e-3])

    @jax.jit
    @jax.grad
    def there_and_back(x):
        return jnp.sum(corrections.join(*corrections.split(x, jnp.uint32(128))) ** 2)

    np.testing.assert_allclose(there_and_back(x), 2 * x, rtol=2.0**-8)
