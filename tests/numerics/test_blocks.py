"""Laws of FP8 in blocks, codes * 2^(exponent - 127), with an exponent that fits the largest.

Scales are powers of two, so FP32 adds nothing to the rounding of the format: a value is off by

    normal codes     half a last place: 2^-4 of the value (E4M3), 2^-3 (E5M2)
    subnormal codes  half of the smallest code, times the scale

without any slack, from one end of normal FP32 to the other. Shapes and sizes come from a fixed
menu, because each compiles anew.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax.numerics import blocks
from coat_jax.numerics.blocks import NOT_FINITE
from coat_jax.numerics.formats import E4M3, E5M2, format_of

LARGEST = 1.75 * 2.0**127  # 2.98e38; above, see the law about 2^128
LEAST = 2.0**-126

to_blocks = jax.jit(blocks.to_blocks, static_argnames=("dtype", "size"))
from_blocks = jax.jit(blocks.from_blocks, static_argnames="size")
formats = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["E4M3", "E5M2"])

# Rank 0, nothing, a tail of one, a short only block, rank 3, whole blocks.
MENU = [((), 16), ((0, 40), 32), ((17,), 16), ((5, 127), 128), ((2, 3, 65), 32), ((4, 256), 16)]
everywhere = pytest.mark.parametrize(
    ("shape", "size", "dtype"),
    [(*case, E4M3) for case in MENU] + [(*case, E5M2) for case in MENU[2:4]],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
# log2 of the largest, binades down to the smallest.
REGIMES = list(itertools.product([-126, -118, -60.3, 0, 70.9, 128], [0, 1, 8, 30, 254]))


def hostile(regime, seed, shape):
    """Numbers of both signs and zeros, of magnitudes 1.2e-38 .. 3e38."""
    rng = np.random.default_rng(seed)
    top, spread = regime
    x = np.exp2(np.maximum(top - spread * rng.random(shape), -126))
    return np.float32(
        np.clip(x, LEAST, LARGEST) * rng.choice([1, -1, 0], shape, p=[0.45, 0.45, 0.1])
    )


def round_trip(x, dtype, size):
    """The codes, per element the exponent, and the decoded value, in NumPy."""
    b = to_blocks(x, dtype, size=size)
    assert b.codes.shape == x.shape
    assert b.exponents.shape == ((*x.shape[:-1], -(-x.shape[-1] // size)) if x.shape else ())
    y = np.asarray(from_blocks(b, size=size))
    assert y.shape == x.shape
    return np.asarray(b.codes).astype(np.float64), spread(b.exponents, x.shape, size), y


@functools.cache
def draws(shape, size, dtype):
    """Hostile numbers of each regime, with what `round_trip` makes of them."""
    xs = [hostile(regime, seed, shape) for seed, regime in enumerate(REGIMES)]
    return [(x, *round_trip(x, dtype, size)) for x in xs]


def spread(of_block, shape, size):
    """One number per block, repeated for its members."""
    of_block = np.asarray(of_block).astype(int)
    return np.repeat(of_block, size, axis=-1)[..., : shape[-1]] if shape else of_block


def block_max(x, size):
    """The largest magnitude of each element's block, in FP64; NaN if one is not finite."""
    x = np.abs(np.where(np.isfinite(x), x, np.nan).astype(np.float64))
    if not x.shape:
        return x
    starts = range(0, x.shape[-1], size)
    largest = [x[..., i : i + size].max(-1, initial=0.0) for i in starts]
    return np.repeat(np.stack(largest, -1), size, axis=-1)[..., : x.shape[-1]]


@everywhere
def test_the_error_is_half_a_last_place_and_the_exponent_the_least_that_fits(shape, size, dtype):
    fmt = format_of(dtype)
    for x, _, exponent, y in draws(shape, size, dtype):
        largest, least = block_max(x, size), fmt.tiny / 2 * np.exp2(exponent - 127.0)
        most = np.maximum(2.0 ** -(fmt.mantissa_bits + 1) * np.abs(x.astype(np.float64)), least)
        assert np.all(np.abs(np.subtract(y, x, dtype=np.float64)) <= most)
        assert np.all((exponent >= 1) & (exponent < NOT_FINITE))
        assert np.all(largest <= fmt.max * np.exp2(exponent - 127.0))
        assert np.all((exponent == 1) | (largest > fmt.max * np.exp2(exponent - 128.0)))


@everywhere
def test_zero_stays_zero_and_signs_stay(shape, size, dtype):
    for x, codes, _, y in draws(shape, size, dtype):
        assert np.all(codes[x == 0] == 0)
        assert np.all(y[x == 0] == 0)
        assert np.all(y * np.sign(x) >= 0)


@everywhere
def test_nan_and_infinity_spoil_their_own_block_and_no_other(shape, size, dtype):
    bad = itertools.cycle(np.float32([np.nan, np.inf, -np.inf]))
    for seed, (x, _, _, untouched) in enumerate(draws(shape, size, dtype)):
        rng = np.random.default_rng(seed)
        spoilt = np.where(rng.random(shape) < rng.random() / size, next(bad), x)
        _, exponent, y = round_trip(spoilt.astype(np.float32), dtype, size)
        in_lost_block = np.isnan(block_max(spoilt, size))
        assert np.all(~np.isfinite(y[in_lost_block]))
        np.testing.assert_array_equal(exponent == NOT_FINITE, in_lost_block)
        np.testing.assert_array_equal(y[~in_lost_block], untouched[~in_lost_block])


@everywhere
def test_a_second_round_trip_changes_nothing(shape, size, dtype):
    for *_, once in draws(shape, size, dtype):
        np.testing.assert_array_equal(round_trip(once, dtype, size)[2], once)


@everywhere
def test_denormals_count_as_zero(shape, size, dtype):
    bits = np.random.default_rng(0).integers(0, 2**23, shape, dtype=np.int32)
    codes, exponent, y = round_trip(bits.view(np.float32), dtype, size)
    assert np.all(np.isfinite(codes))
    assert np.all(exponent == 1)
    assert np.all(y == 0)


@formats
def test_values_of_the_format_are_exact(dtype):
    """All of them, next to the largest one, at both ends of FP32 and in between."""
    fmt = format_of(dtype)
    with np.errstate(invalid="ignore"):
        values = np.arange(256, dtype=np.uint8).view(jnp.dtype(dtype)).astype(np.float32)
    values = values[np.isfinite(values)]
    highest = 127 - int(np.log2(fmt.max / 1.75))
    lowest = -126 - int(np.log2(fmt.tiny))
    for power in (lowest, -90, 0, 90, highest):
        x = values * np.float32(2.0**power)
        codes, exponent, y = round_trip(x, dtype, 256)
        np.testing.assert_array_equal(codes, values)
        np.testing.assert_array_equal(exponent, power + 127)
        np.testing.assert_array_equal(y, x)


@formats
def test_the_exponent_is_right_around_every_step(dtype):
    """It steps at 1.75 times a power of two: the five FP32 numbers around each."""
    fmt = format_of(dtype)
    steps = np.arange(1, 255, dtype=np.uint32)[:, None] << 23 | 0x600000
    x = (steps + np.arange(-2, 3).astype(np.uint32)).view(np.float32).reshape(-1, 1)
    codes, exponent, y = round_trip(x, dtype, 16)
    assert np.all(x <= fmt.max * np.exp2(exponent - 127.0))
    assert np.all((exponent == 1) | (x > fmt.max * np.exp2(exponent - 128.0)))
    assert np.all((codes >= fmt.max / 2) | (exponent == 1))
    np.testing.assert_allclose(y, x, rtol=2.0 ** -(fmt.mantissa_bits + 1))


@formats
def test_values_that_round_to_2_to_the_128_are_infinite_and_no_others(dtype):
    """FP32 has no such number: the last half place overflows as in a cast to BF16."""
    half_place = 2.0 ** -(format_of(dtype).mantissa_bits + 1)
    x = np.float32(2.0**127 * np.linspace(1, 2, 4096, endpoint=False))[:, None]
    exact = np.float64(x) < 2.0**128 * (1 - half_place / 2)
    _, _, y = round_trip(x, dtype, 16)
    np.testing.assert_array_equal(np.isfinite(y), exact)
    np.testing.assert_allclose(y[exact], x[exact], rtol=half_place)
