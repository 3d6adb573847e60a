"""Statistics of tensors made by hand, for which each number is known."""

import jax
import numpy as np
import pytest

from coat_jax import E4M3, E5M2
from coat_jax.numerics import blocks, statistics
from coat_jax.numerics.blocks import Blocks
from coat_jax.numerics.statistics import NUMBERS, Sums, of_sums

# One program each for a shape, as in training.
of_tensor = jax.jit(statistics.of_tensor, static_argnums=2)
of_blocks = jax.jit(statistics.of_blocks, static_argnames="size")
of_int8 = jax.jit(statistics.of_int8)
column_squares = jax.jit(statistics.column_squares)
to_blocks = jax.jit(blocks.to_blocks, static_argnames="size")


def tensor(values, scale=1.0, dtype=E4M3):
    x = np.asarray(values, np.float32)
    return of_sums(np.asarray(of_tensor(x, np.float32(scale), dtype)))


def test_a_tensor_of_codes_has_no_error():
    found = tensor([[448.0, -1.75, 0.0, 2.0**-6, 0, 0, 0]])
    assert found == pytest.approx((0.0, 0.0, 0.0, 0.0, 0.0), abs=1e-6)


@pytest.mark.parametrize(
    ("dtype", "values", "largest"),
    [
        # Of six non-zero values two become zero, 2^-10 by rounding to even; two are subnormal.
        (E4M3, [1.0, 2.0**-10, -(2.0**-11), 2.0**-9, -(2.0**-7), 0.0, 2.0**-6], 448.0),
        (E5M2, [1.0, 2.0**-17, -(2.0**-18), 2.0**-16, -(2.0**-15), 0.0, 2.0**-14], 57344.0),
    ],
    ids=["E4M3", "E5M2"],
)
def test_values_below_half_the_smallest_code_are_lost_and_those_beyond_the_largest_saturate(
    dtype, values, largest
):
    found = tensor([values], dtype=dtype)
    assert found.underflow == pytest.approx(2 / 6)
    assert found.subnormal == pytest.approx(2 / 6)
    assert found.saturated == 0.0
    assert found.headroom == pytest.approx(np.log2(largest))
    found = tensor([[largest, 2 * largest, -4 * largest, 0, 0, 0, 0]], dtype=dtype)
    assert found.saturated == pytest.approx(2 / 3)
    assert found.headroom == pytest.approx(-2.0)
    # The values are 1, 2 and 4 of the largest code; 1 and 3 are lost of the latter two.
    assert found.error == pytest.approx(np.sqrt((1 + 9) / (1 + 4 + 16)))


def test_the_error_is_that_of_the_codes():
    """1.0625 and 1.1875 lie half-way: one is rounded down to even, the other up."""
    found = tensor([[1.0625, 1.1875, 0, 0, 0, 0, 0]])
    assert found.error == pytest.approx(0.0625 * np.sqrt(2) / np.hypot(1.0625, 1.1875))


def test_a_scale_moves_all_of_it():
    values = np.array([[1.0, 2.0**-10, 3.0, 2.0**-8, 0.0, 0.0, 0.0]])
    for power in (-90, 90):  # whose squares FP32 cannot hold
        assert tensor(values * 2.0**power, scale=2.0**power) == pytest.approx(tensor(values))


def test_zeros_have_no_error_and_no_headroom():
    found = tensor(np.zeros((1, 7)))
    assert found[:3] == (0.0, 0.0, 0.0)
    assert found.error == 0.0
    assert np.isnan(found.headroom)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_infinity_have_no_finite_error(bad):
    assert np.isnan(tensor([[1.0, bad, 0, 0, 0, 0, 0]], scale=np.nan).error)
    assert np.isnan(in_blocks(np.float32([[1.0, bad] + [1.0] * 46])).error)


def in_blocks(x, size=16):
    return of_sums(np.asarray(of_blocks(x, to_blocks(x, size=size), size=size)))


def test_blocks_have_their_own_scales():
    """448 and 2^-10 lose the small one in a tensor, not in two blocks; the third block is zero."""
    x = np.zeros((1, 48), np.float32)
    x[0, 0], x[0, 16] = 448.0, 2.0**-10
    apart = in_blocks(x)
    assert apart.underflow == 0.0
    assert apart.error == 0.0
    # 448 is a largest code; 2^-10 is 1.75 times smaller than the largest that its exponent allows.
    assert apart.headroom == pytest.approx(np.log2(1.75) / 2)
    assert in_blocks(x, size=64).underflow == 0.5


def test_a_short_last_block_counts_and_blocks_that_saturate_are_seen():
    """No rounding of this package makes those: exponents of another one."""
    x = np.ones((3, 20), np.float32)
    x[:, 16:] = 2.0**-30
    saved = to_blocks(x, size=16)
    found = Sums(*of_blocks(x, saved, size=16).tolist())
    assert (found.size, found.nonzero, found.scales) == (60, 60, 6)
    assert found.underflow == 0
    low = Blocks(np.full((3, 20), 448.0, E4M3), np.full((3, 2), 127, np.uint8))
    beyond = np.full((3, 20), 1000, np.float32)
    assert of_sums(np.asarray(of_blocks(beyond, low, size=16))).saturated == 1.0


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_sums_of_parts_are_those_of_the_whole(dtype):
    values = np.random.default_rng(1).standard_normal((6, 40)) ** 9
    values[0, 0] = values[3, 0] = 40000.0  # one headroom
    x, scale = values.astype(np.float32), np.float32(0.5)
    whole = of_tensor(x, scale, dtype)
    parts = sum(of_tensor(part, scale, dtype) for part in (x[:3], x[3:]))
    sums, added = Sums(*whole.tolist()), Sums(*parts.tolist())
    assert added.scales == 2 * sums.scales
    got, wanted = of_sums(np.asarray(parts)), of_sums(np.asarray(whole))
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
    assert whole.shape == (NUMBERS,)


def test_counts_are_right_beyond_what_fp32_counts():
    """16.8 million ones, one by one, would stop at 2^24."""
    true = np.ones((2**13 + 1, 2**11), bool)
    assert float(jax.jit(statistics._count)(true)) == pytest.approx(true.size, rel=1e-6)


def test_rows_of_int8_have_an_error_of_a_uniform_step():
    """Numbers under half a step of their row underflow; nothing saturates or is subnormal."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (8, 4096)) * 10.0 ** np.arange(-4, 4)[:, None]
    found = of_sums(np.asarray(of_int8(np.float32(x), np.ones(4096, np.float32))))
    # The deviation of uniform numbers is 1 / sqrt(3).
    assert found.error == pytest.approx(3**0.5 / 127 / 12**0.5, rel=0.02)
    assert found.underflow == pytest.approx(0.5 / 127, rel=0.2)
    assert found.subnormal == found.saturated == found.headroom == 0


def test_an_error_in_int8_is_that_of_the_product():
    """Of rows and columns that are independent, errors add up as the squares of their terms do."""
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(256, 512)), rng.normal(size=(512, 256))
    x[:, ::64] *= 100
    w[::64] /= 100
    weights = column_squares(np.float32(w.T))
    found = of_sums(np.asarray(of_int8(np.float32(x), weights)))
    steps = np.max(np.abs(x), axis=1, keepdims=True) / 127
    error = (np.round(x / steps) * steps - x) @ w
    assert found.error == pytest.approx(np.linalg.norm(error) / np.linalg.norm(x @ w), rel=0.02)
    assert found.error > 0.3


def test_squares_of_columns_neither_overflow_nor_underflow():
    """Columns without usable squares count alike."""
    for x in (np.zeros((2, 2)), [[np.inf, 1], [1, 1]], [[np.nan, 1], [1, 1]], np.zeros((0, 2))):
        np.testing.assert_array_equal(column_squares(np.asarray(x, np.float32)), [1, 1])
    for size in (1e-30, 1e30):
        x = size * np.float32([[1, 2], [2, 4]])
        found = column_squares(x, np.float32(0.5) * x)
        np.testing.assert_allclose(found, np.array([5, 20]) * 1.25 / 16, rtol=1e-5)
