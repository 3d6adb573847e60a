"""Laws of integer formats."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax.numerics.integer_format import IntegerFormat, integer_format

X = np.concatenate([np.arange(-140, 140, 0.25), [0.4999999, 1e30, -1e30]]).astype(np.float32)


def test_codes_are_those_of_twos_complement():
    for bits in range(2, 17):
        full = IntegerFormat(bits, symmetric=False).values
        np.testing.assert_array_equal(full, np.arange(-(2 ** (bits - 1)), 2 ** (bits - 1)))
        np.testing.assert_array_equal(IntegerFormat(bits).values, full[1:])


@pytest.mark.parametrize("symmetric", [True, False])
def test_nearest_is_numpys_with_ties_to_even(symmetric):
    fmt = IntegerFormat(8, symmetric)
    np.testing.assert_array_equal(fmt.round(X), np.clip(np.rint(X), fmt.min, fmt.max))


def test_truncation_goes_towards_zero():
    np.testing.assert_array_equal(IntegerFormat(16).round(X[:-2], "truncate"), np.trunc(X[:-2]))


def test_stochastic_rounding_is_right_on_average():
    x = X[np.abs(X) < 127]
    noise = np.float32((np.arange(64) + 0.5) / 64)[:, None] + np.zeros(x.shape, np.float32)
    mean = IntegerFormat(8).round(np.broadcast_to(x, noise.shape), "stochastic", noise).mean(0)
    np.testing.assert_allclose(mean, x, atol=0.51 / 64)


def test_the_gradient_is_that_of_a_cast():
    gradient = jax.grad(lambda x: IntegerFormat(4).round(x).sum())(jnp.array([0.3, 50.0]))
    np.testing.assert_array_equal(gradient, 1.0)


@pytest.mark.parametrize("name", ["INT2", "INT8", "INT4:asymmetric"])
def test_a_format_is_found_by_its_name(name):
    assert integer_format(name).name == name


@pytest.mark.parametrize("bits", [0, 1, 17, 8.0, True, "8"])
def test_other_widths_are_refused(bits):
    with pytest.raises(ValueError, match=r"must be a whole number from 2 to 16"):
        IntegerFormat(bits)


@pytest.mark.parametrize("name", ["INT", "INT8:odd", "UINT8"])
def test_unknown_names_are_refused(name):
    with pytest.raises(ValueError, match="does not name integers: write INT8"):
        integer_format(name)
