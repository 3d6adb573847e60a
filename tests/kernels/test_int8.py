"""Products in INT8, against FP64 NumPy; each law holds for any rows, whatever their sizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from coat_jax.errors import UserError
from coat_jax.kernels import int8

RNG = np.random.default_rng(0)
# Rows of very different sizes, down to where FP32 has few bits left.
SIZES = np.float32(2.0) ** np.array([0, 10, -10, 60, -60, -110])
X = jax.device_put(np.float32(RNG.standard_normal((6, 96)) * SIZES[:, None]))
W = jax.device_put(np.float32(RNG.standard_normal((96, 40))))


round_rows, round_columns = jax.jit(int8.round_rows), jax.jit(int8.round_columns)


@functools.partial(jax.jit, static_argnames="dtype")
def product(x, w, dtype=jnp.float32):
    return int8.product(int8.round_rows(x), int8.round_columns(w)).scaled(dtype)


@pytest.fixture(scope="module")
def rows():
    return round_rows(X)


def test_a_code_is_the_nearest_of_its_row_and_the_largest_has_the_largest_code(rows):
    x, scale = np.float64(X), np.float64(rows.scale)[:, None]
    assert rows.codes.dtype == jnp.int8
    np.testing.assert_array_equal(rows.largest, np.max(np.abs(X), axis=1))
    np.testing.assert_allclose(scale[:, 0], rows.largest / np.float64(127), rtol=1e-6)
    assert np.max(np.abs(np.float64(rows.codes) * scale - x) / scale) <= 0.5001
    at = np.argmax(np.abs(X), axis=1)
    assert np.all(np.abs(np.int32(rows.codes)[range(len(at)), at]) == 127)


def test_columns_are_the_rows_of_the_transpose():
    for got, want in zip(round_columns(W), round_rows(np.transpose(W)), strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_product_is_that_of_the_codes(rows):
    columns = round_columns(W)
    x, w = (np.float64(each.codes) for each in (rows, columns))
    scales = np.outer(np.float64(rows.scale), np.float64(columns.scale))
    got = int8.product(rows, columns).scaled(jnp.float32)
    # Sums are exact; each scale and each of two multiplications is rounded to FP32 once.
    np.testing.assert_allclose(got, x @ w.T * scales, rtol=4 * 2.0**-24)


def test_a_product_of_ordinary_size_is_right_whatever_the_sizes_of_its_operands():
    for of_x, of_w in ((1e37, 1e-6), (1e-6, 1e37), (1e-37, 1e30)):
        x, w = np.abs(X)[:1] * np.float32(of_x), np.abs(W) * np.float32(of_w)
        np.testing.assert_allclose(product(x, w), np.float64(x) @ np.float64(w), rtol=0.02)


def test_a_sum_that_may_exceed_int32_is_refused():
    codes = jax.ShapeDtypeStruct((1, 131_072), jnp.int8)
    operand = int8.RowCodes(codes, jax.ShapeDtypeStruct((1,), jnp.float32))
    said = r"sum of 131072 products .* 131071 is the most. Use FP8 .* coat.COAT"
    with pytest.raises(UserError, match=said):
        jax.eval_shape(int8.product, operand, operand)


def test_zero_stays_zero():
    x = np.array(X)
    x[1] = x[2, 5] = 0
    codes = np.asarray(round_rows(x).codes)
    assert not np.any(codes[1])
    assert codes[2, 5] == 0
    y = product(x, W)
    assert not np.any(y[1])
    assert np.all(np.isfinite(y))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_only_the_row_of_a_number_that_is_not_finite_is_lost(bad):
    x, w = np.array(X), np.array(W)
    x[2, 7] = w[3, 9] = bad
    assert np.flatnonzero(np.isnan(round_rows(x).largest)).tolist() == [2]
    finite = np.isfinite(np.float32(product(x, W, jnp.bfloat16)))
    assert not finite[2].any()
    assert finite[[0, 1, 3, 4, 5]].all()
    finite = np.isfinite(product(X, w))
    assert not finite[:, 9].any()
    assert np.delete(finite, 9, axis=1).all()


def test_a_row_without_elements_has_an_empty_sum():
    y = product(np.asarray(X)[:, :0], np.asarray(W)[:0])
    np.testing.assert_array_equal(y, np.zeros((6, 40)))


@pytest.mark.parametrize("spec", [P("x"), P(None, "x")], ids=["rows", "columns"])
def test_results_do_not_depend_on_the_mesh(spec):
    """To the last bit: a sum of integers has no order."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x = np.tile(X, (2, 1))
    sharded = product(
        jax.device_put(x, NamedSharding(mesh, spec)),
        jax.device_put(W, NamedSharding(mesh, P(spec[-1] if len(spec) > 1 else None))),
    )
    np.testing.assert_array_equal(sharded, product(x, W))
