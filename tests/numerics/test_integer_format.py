"""Laws of integer formats."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax.numerics.integer_format import IntegerFormat, integer_format

X = np.concatenate([np.arange(-140, 140, 0.25), [0.4999999, 1e30, -1e30]]).astype(np.float32)


def test_codes_are_those_of_twos_complement_and_a_format_is_found_by_its_name():
    for bits in range(2, 17):
        full, symmetric = IntegerFormat(bits, symmetric=False), IntegerFormat(bits)
        np.testing.assert_array_equal(full.values, np.arange(-(2 ** (bits - 1)), 2 ** (bits - 1)))
        np.testing.assert_array_equal(symmetric.values, full.values[1:])
        assert [integer_format(fmt.name) for fmt in (full, symmetric)] == [full, symmetric]


def test_nearest_is_numpys_truncation_goes_towards_zero_and_noise_is_right_on_average():
    x = X[np.abs(X) < 127]
    noise = np.float32((np.arange(64) + 0.5) / 64)[:, None] + np.zeros(x.shape, np.float32)
    formats = IntegerFormat(8), IntegerFormat(8, symmetric=False)

    @jax.jit
    def rounded():
        at_random = formats[0].round(np.broadcast_to(x, noise.shape), "stochastic", noise)
        return [f.round(X) for f in formats], IntegerFormat(16).round(x, "truncate"), at_random

    nearest, truncated, at_random = rounded()
    for fmt, found in zip(formats, nearest, strict=True):
        np.testing.assert_array_equal(found, np.clip(np.rint(X), fmt.min, fmt.max))
    np.testing.assert_array_equal(truncated, np.trunc(x))
    np.testing.assert_allclose(np.mean(at_random, axis=0), x, atol=0.51 / 64)


def test_the_gradient_is_that_of_a_cast():
    gradient = jax.grad(lambda x: IntegerFormat(4).round(x).sum())(jnp.array([0.3, 50.0]))
    np.testing.assert_array_equal(gradient, 1.0)


def test_other_widths_and_names_are_refused():
    for bits in (0, 1, 17, 8.0, True, "8"):
        with pytest.raises(ValueError, match=r"must be a whole number from 2 to 16"):
            IntegerFormat(bits)
    for name in ("INT", "INT8:odd", "UINT8"):
        with pytest.raises(ValueError, match="does not name integers: write INT8"):
            integer_format(name)
