"""Laws of 8-bit codes with free scales."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from coat_jax.numerics import eight_bits
from coat_jax.numerics.quantizer import Quantizer

encode = jax.jit(eight_bits.encode, static_argnums=2)
channel_scales = jax.jit(eight_bits.channel_scales, static_argnums=(1, 2, 3))
NAMES = pytest.mark.parametrize("name", eight_bits.DTYPES)


@NAMES
def test_the_format_of_codes_is_known_by_their_dtype(name):
    assert eight_bits.format_of_codes(eight_bits.DTYPES[name]) == name
    with pytest.raises(ValueError, match="must be int8 or float8_e4m3fn"):
        eight_bits.format_of_codes(jnp.bfloat16)


@NAMES
def test_codes_are_rounded_to_nearest_and_saturate(name):
    x = np.linspace(-600, 600, 24001).astype(np.float32)
    codes = np.asarray(encode(x, np.float32(1), name))
    clipped = np.clip(x, -448, 448) if name == "fp8" else np.clip(np.rint(x), -128, 127)
    expected = clipped.astype(ml_dtypes.float8_e4m3fn if name == "fp8" else np.int8)
    np.testing.assert_array_equal(codes.astype(np.float32), expected.astype(np.float32))


@NAMES
@pytest.mark.parametrize("fit", ["max", "mse", "percentile"])
def test_values_are_those_of_the_quantizer(name, fit):
    """But for the code -128, which simulated symmetric integers lack."""
    w = jax.random.normal(jax.random.key(0), (64, 8)) * jnp.arange(1, 9)
    quantizer = Quantizer(eight_bits.SIMULATED[name], over="channel", fit=fit, percentile=95.0)

    @jax.jit
    def both(w):
        scale = eight_bits.channel_scales(w, name, fit, 95.0)
        codes = eight_bits.encode(w, scale, name).astype(jnp.float32)
        return jnp.maximum(codes, -eight_bits.LARGEST[name]) * scale, quantizer(w)

    values, expected = both(w)
    np.testing.assert_allclose(values, expected, rtol=1e-6)


@NAMES
def test_rounded_values_are_those_of_the_codes(name):
    x = np.random.default_rng(2).standard_normal((50, 40)) * np.logspace(-4, 3, 40)
    x, scale = np.float32(x), np.float32(0.37)
    values = np.float32(encode(x, scale, name)) * scale
    ours = jax.jit(eight_bits.rounded, static_argnums=2)(x, scale, name)
    np.testing.assert_allclose(ours, values, rtol=1e-6)
    assert (np.asarray(ours) != np.asarray(x)).any()


@NAMES
def test_zeros_have_a_scale_and_stay_zero_and_lost_channels_have_none(name):
    w = np.float32([[2, 0, 0]] * 4)
    scale = np.asarray(channel_scales(w, name, "max", 99.9))
    assert scale[1] == scale[2] == 1
    codes = np.float32(encode(w, scale, name))
    np.testing.assert_array_equal(codes[:, 1:], 0)
    np.testing.assert_array_equal(codes[:, 0], eight_bits.LARGEST[name])
    w[1, :2] = np.nan, np.inf
    lost = np.isnan(channel_scales(w, name, "max", 99.9))
    np.testing.assert_array_equal(lost, [True, True, False])


@NAMES
def test_a_scale_is_never_so_small_that_it_counts_as_zero(name):
    """XLA takes numbers under 2^-126 for 0, and 0 / 0 is a NaN."""
    tiny = float(np.finfo(np.float32).tiny)
    w = np.linspace(-1, 1, 65)[:, None] * np.array([tiny, 8 * tiny, 300 * tiny, 1e-3])
    w = np.float32(w)
    scale = np.asarray(channel_scales(w, name, "max", 99.9))
    assert (scale >= tiny).all()
    values = np.float32(encode(w, scale, name)) * scale
    # Half a step of the coarser of both scales, or E4M3's relative error.
    error = np.abs(np.asarray(values, np.float64) - np.asarray(w, np.float64))
    coarse = np.maximum(np.asarray(scale, np.float64), tiny)
    assert (error <= np.maximum(coarse, np.abs(np.asarray(w, np.float64)) / 16)).all()
