"""What the rows of a norm have in common is not rounded, and nothing else changes.

y = r(n - c) r(w) + c r(w)         c: the mean of norm(x) over a sample of its rows
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from ops_cases import (
    FFN,
    WIDTH,
    assert_equal,
    draw,
    plain_norm,
    pulled,
    quick_jit,
    some_norm,
    weight,
)

import coat_jax as coat
from coat_jax import ops
from coat_jax.kernels.norm import SAMPLED_ROWS, sampled_mean

CENTERED = dataclasses.replace(coat.COAT, stochastic=False, center_inputs=True)
NOT_CENTERED = dataclasses.replace(CENTERED, center_inputs=False)
WEIGHT = weight(1, WIDTH, FFN)
kinds = pytest.mark.parametrize("kind", ["rms", "layer"])


def outputs(x, norm, w=WEIGHT):
    """norm(x) w, centered and not, and of the exact norm with the same rounded weight."""
    run = quick_jit(
        lambda x, w: [
            ops.norm_linear(x, norm, w, precision=precision)
            for precision in (CENTERED, NOT_CENTERED)
        ]
    )
    identity = jnp.eye(w.shape[0])
    rounded_weight = ops.linear(identity, w, precision=coat.COAT)  # powers of two are exact
    exact = np.float64(plain_norm(x, norm)) @ np.float64(rounded_weight)
    return [np.float64(y) for y in run(x, w)] + [exact]


@kinds
def test_rows_that_are_all_alike_are_not_rounded(kind):
    x = jnp.broadcast_to(draw(2, (WIDTH,)), (2, 8, WIDTH))
    centered, rounded, exact = outputs(x, some_norm(kind, WIDTH))
    np.testing.assert_allclose(centered, exact, rtol=0, atol=1e-5 * np.abs(exact).max())
    assert np.abs(rounded - exact).max() > 5e-3 * np.abs(exact).max()


@kinds
def test_what_distinguishes_the_rows_keeps_the_digits_of_fp8(kind):
    """It is a hundredth of the rows, less than half of the distance of two codes."""
    x = draw(2, (WIDTH,)) + 0.01 * draw(3, (4, 16, WIDTH))
    centered, rounded, exact = (y - y.mean(axis=(0, 1)) for y in outputs(x, some_norm(kind, WIDTH)))
    error = np.linalg.norm(centered - exact) / np.linalg.norm(exact)
    assert error < 2**-4
    assert np.linalg.norm(rounded - exact) > 8 * np.linalg.norm(centered - exact)


def test_gradients_are_those_of_inputs_that_are_not_centered():
    """The backward pass sees the same codes and scales, and the offset has no gradient."""
    x, norm = 1 + draw(4, (2, 8, WIDTH)), some_norm("rms", WIDTH)
    found = []
    for precision in (CENTERED, NOT_CENTERED):

        def run(x, norm, w, precision=precision):
            return ops.norm_linear(x, norm, w, precision=precision)

        found.append(pulled(run, x, norm, WEIGHT, dy=draw(5, (2, 8, FFN)))[1])
    assert_equal(*found)


def test_the_scale_fits_a_row_that_is_the_opposite_of_the_mean():
    """The norms are 6.58, three times, and -6.58, and 9.87 below their mean.

    Without an offset they are bounded by 6.99, for which the scale has a largest value of 7.
    """
    x = jnp.zeros((4, 49)).at[:, 0].set(jnp.array([1.0, 1.0, 1.0, -1.0]))
    centered, _, exact = outputs(x, ops.Norm(jnp.full(49, 0.94)), jnp.eye(49))
    np.testing.assert_allclose(centered, exact, rtol=0, atol=2**-4 * 9.87)


@kinds
def test_a_nan_stays_in_its_row(kind):
    x = draw(6, (2, 8, WIDTH)).at[1, 3, 5].set(jnp.nan)
    centered, *_ = outputs(x, some_norm(kind, WIDTH))
    of_rows = np.isnan(centered).any(axis=-1)
    assert of_rows[1, 3]
    assert of_rows.sum() == 1


@kinds
@pytest.mark.parametrize(
    ("shape", "rows"),
    [((1, 1), 1), ((2, 5), 10), ((2, 300), 600), ((4, 512), 512), ((600, 3), 600)],
)
def test_the_mean_is_of_rows_from_all_of_each_sequence(kind, shape, rows):
    """Of all of them, up to twice the number to be sampled; else at equal distances."""
    batch, length = shape
    x, norm = draw(7, (*shape, 6)), some_norm(kind, 6)
    distance = batch * length // rows
    sample = x[:, distance // 2 :: distance]
    assert sample.shape[0] * sample.shape[1] == rows
    assert rows >= min(batch * length, SAMPLED_ROWS)
    want = plain_norm(sample, norm).mean(axis=(0, 1))
    np.testing.assert_allclose(sampled_mean(x, norm), want, atol=1e-5)


def test_one_row_is_its_own_mean():
    """So nothing is left to round."""
    x = draw(8, (1, WIDTH))
    centered, _, exact = outputs(x, some_norm("rms", WIDTH))
    np.testing.assert_allclose(centered, exact, rtol=0, atol=1e-5 * np.abs(exact).max())
