"""Laws of the embedding: a lookup, whose gradient is a sum in FP32 rounded once."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from coat_jax import ops

V, D, N = 64, 16, 4096


def table(dtype):
    return jax.random.normal(jax.random.key(0), (V, D)).astype(dtype)


def tokens_and_gradient(dtype):
    """A frequent token has half of the places, and gradients that agree: their sum is large."""
    rng = np.random.default_rng(0)
    tokens = np.where(rng.random((2, N // 2)) < 0.5, 3, rng.integers(0, V, (2, N // 2)))
    gradient = 1 + rng.standard_normal((2, N // 2, D))
    return tokens, jnp.asarray(gradient, dtype)


@partial(jax.jit, static_argnums=0)
def gradient_of(lookup, weight, tokens, gradient):
    return jax.vjp(lambda w: lookup(w, tokens), weight)[1](gradient)[0]


def summed(tokens, gradient):
    """The gradient, in FP64."""
    total = np.zeros((V, D))
    np.add.at(total, tokens, np.asarray(gradient, np.float64))
    return total


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_rows_are_those_of_the_table(dtype):
    weight, (tokens, _) = table(dtype), tokens_and_gradient(dtype)
    rows = jax.jit(ops.embedding)(weight, tokens)
    assert rows.dtype == dtype
    np.testing.assert_array_equal(rows, np.asarray(weight)[tokens])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_the_gradient_of_a_frequent_token_is_rounded_once(dtype):
    tokens, gradient = tokens_and_gradient(dtype)
    wanted = summed(tokens, gradient)
    got = np.asarray(gradient_of(ops.embedding, table(dtype), tokens, gradient), np.float64)
    unit = float(jnp.finfo(dtype).eps) / 2 + 1e-6  # of the rounding, and of sums in FP32
    assert np.all(np.abs(got - wanted) <= unit * np.abs(wanted) + 1e-3)
    if dtype != jnp.float32:  # why it is not left to JAX
        plain = gradient_of(lambda w, t: w[t], table(dtype), tokens, gradient)
        assert np.abs(np.asarray(plain[3], np.float64) / wanted[3] - 1).max() > 8 * unit


def test_a_token_that_has_no_row_is_nan_and_has_no_gradient():
    tokens = jnp.array([0, -1, V, V - 1])
    weight = table(jnp.float32)
    rows = ops.embedding(weight, tokens)
    np.testing.assert_array_equal(jnp.isnan(rows).all(axis=1), [False, True, True, False])
    got = gradient_of(ops.embedding, weight, tokens, jnp.ones((4, D)))
    np.testing.assert_array_equal(got.sum(axis=1), D * np.isin(np.arange(V), [0, V - 1]))


@pytest.mark.parametrize("spec", [P("fsdp"), P(None, "fsdp"), P()], ids=str)
def test_it_does_not_depend_on_the_mesh(spec):
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    tokens, gradient = tokens_and_gradient(jnp.bfloat16)
    alone = gradient_of(ops.embedding, table(jnp.bfloat16), tokens, gradient)
    with jax.set_mesh(mesh):
        weight = jax.device_put(table(jnp.bfloat16), NamedSharding(mesh, spec))
        placed = NamedSharding(mesh, P("data", "fsdp"))
        where, what = (jax.device_put(x, placed) for x in (tokens, gradient))
        rows = jax.jit(ops.embedding)(weight, where)
        np.testing.assert_array_equal(rows, np.asarray(table(jnp.bfloat16))[tokens])
        got = gradient_of(ops.embedding, weight, where, what)
    np.testing.assert_allclose(np.float32(got), np.float32(alone), rtol=2**-7)


def test_vectorized_lookups_are_those_of_each_table():
    tokens, gradient = tokens_and_gradient(jnp.float32)
    one = np.asarray(table(jnp.float32))
    weights = np.stack([one, 2 * one])
    rows = jax.jit(jax.vmap(ops.embedding))(weights, tokens)
    np.testing.assert_array_equal(
        rows, np.stack([w[t] for w, t in zip(weights, tokens, strict=True)])
    )
    got = jax.vmap(lambda w, t, g: gradient_of(ops.embedding, w, t, g))(weights, tokens, gradient)
    for one, t, g in zip(got, tokens, gradient, strict=True):
        np.testing.assert_allclose(one, summed(t, g), rtol=1e-5, atol=1e-3)


def test_second_derivatives():
    weight, tokens = table(jnp.float32)[:4, :2], jnp.array([0, 2, 2])

    def loss(w):
        return jnp.sum(ops.embedding(w, tokens) ** 2)

    wanted = 2 * np.repeat([1, 0, 2, 0], 2)
    hessian = jax.jit(jax.hessian(loss))(weight)
    np.testing.assert_allclose(np.reshape(hessian, (8, 8)), np.diag(wanted))


@pytest.mark.parametrize("x64", [False, True])
def test_a_token_that_32_bits_do_not_hold_has_no_row(x64):
    """JAX would make token 1 of 2^32 + 1."""
    with jax.enable_x64(x64):
        for tokens in (np.array([2**32 + 1, 3]), np.array([-(2**32) + 1, 3])):
            rows = ops.embedding(table(jnp.float32), tokens)
            np.testing.assert_array_equal(jnp.isnan(rows).all(axis=1), [True, False])
        rows = ops.embedding(table(jnp.float32), np.array([2**63 + 1, 3], np.uint64))
        np.testing.assert_array_equal(jnp.isnan(rows).all(axis=1), [True, False])


def test_a_table_of_numpy_is_an_array():
    table = np.ones((V, D), np.float32)
    assert ops.embedding(table, np.array([3])).shape == (1, D)


@pytest.mark.parametrize(
    ("weight", "tokens", "error", "words"),
    [
        (np.ones((V, D), np.int32), np.zeros(2, np.int32), TypeError, "real floats"),
        (
            np.ones(V, np.float32),
            np.zeros(2, np.int32),
            ValueError,
            r"a table \[V, D\] of at least one row, not \(64,\)",
        ),
        (
            np.ones((V, D), np.float32),
            np.zeros(2, np.float32),
            TypeError,
            "whole numbers, not float32",
        ),
    ],
)
def test_refusals(weight, tokens, error, words):
    with pytest.raises(error, match=words):
        ops.embedding(weight, tokens)
