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
    return np.random.default_rng(1).standard_normal((V, D)).astype(dtype)


def tokens_and_gradient(dtype):
    """A frequent token has half of the places, and gradients that agree: their sum is large."""
    rng = np.random.default_rng(0)
    tokens = np.where(rng.random((2, N // 2)) < 0.5, 3, rng.integers(0, V, (2, N // 2)))
    gradient = 1 + rng.standard_normal((2, N // 2, D))
    return tokens, gradient.astype(dtype)


@partial(jax.jit, static_argnums=0)
def rows_and_gradient(lookup, weight, tokens, gradient):
    rows, pull = jax.vjp(lambda w: lookup(w, tokens), weight)
    return rows, pull(gradient)[0]


def summed(tokens, gradient):
    """The gradient, in FP64."""
    total = np.zeros((V, D))
    np.add.at(total, tokens, np.asarray(gradient, np.float64))
    return total


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_it_is_a_lookup_and_the_gradient_of_a_frequent_token_is_rounded_once(dtype):
    tokens, gradient = tokens_and_gradient(dtype)
    rows, got = rows_and_gradient(ops.embedding, table(dtype), tokens, gradient)
    assert rows.dtype == dtype
    np.testing.assert_array_equal(rows, table(dtype)[tokens])
    wanted, got = summed(tokens, gradient), np.asarray(got, np.float64)
    unit = float(jnp.finfo(dtype).eps) / 2 + 1e-6  # of the rounding, and of sums in FP32
    assert np.all(np.abs(got - wanted) <= unit * np.abs(wanted) + 1e-3)
    if dtype != jnp.float32:  # why it is not left to JAX
        _, plain = rows_and_gradient(lambda w, t: w[t], table(dtype), tokens, gradient)
        assert np.abs(np.asarray(plain[3], np.float64) / wanted[3] - 1).max() > 8 * unit


def test_a_token_that_has_no_row_is_nan_and_has_no_gradient():
    tokens, ones = jnp.array([0, -1, V, V - 1]), np.ones((4, D), np.float32)
    rows, got = rows_and_gradient(ops.embedding, table(np.float32), tokens, ones)
    np.testing.assert_array_equal(jnp.isnan(rows).all(axis=1), [False, True, True, False])
    np.testing.assert_array_equal(got.sum(axis=1), D * np.isin(np.arange(V), [0, V - 1]))


@pytest.mark.parametrize("spec", [P("fsdp"), P(None, "fsdp")], ids=str)
def test_it_does_not_depend_on_the_mesh(spec):
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    tokens, gradient = tokens_and_gradient(jnp.bfloat16)
    _, alone = rows_and_gradient(ops.embedding, table(jnp.bfloat16), tokens, gradient)
    with jax.set_mesh(mesh):
        weight = jax.device_put(table(jnp.bfloat16), NamedSharding(mesh, spec))
        placed = NamedSharding(mesh, P("data", "fsdp"))
        where, what = (jax.device_put(x, placed) for x in (tokens, gradient))
        rows, got = rows_and_gradient(ops.embedding, weight, where, what)
    np.testing.assert_array_equal(rows, table(jnp.bfloat16)[tokens])
    np.testing.assert_allclose(np.float32(got), np.float32(alone), rtol=2**-7)


def test_vectorized_lookups_are_those_of_each_table():
    tokens, gradient = tokens_and_gradient(np.float32)
    weights = np.stack([table(np.float32), 2 * table(np.float32)])
    both = jax.vmap(partial(rows_and_gradient, ops.embedding))(weights, tokens, gradient)
    for rows, got, w, t, g in zip(*both, weights, tokens, gradient, strict=True):
        np.testing.assert_array_equal(rows, w[t])
        np.testing.assert_allclose(got, summed(t, g), rtol=1e-5, atol=1e-3)


def test_second_derivatives():
    tokens = jnp.array([0, 2, 2])

    def loss(w):
        return jnp.sum(ops.embedding(w, tokens) ** 2)

    wanted = 2 * np.repeat([1, 0, 2, 0], 2)
    hessian = jax.jit(jax.hessian(loss))(table(np.float32)[:4, :2])
    np.testing.assert_allclose(np.reshape(hessian, (8, 8)), np.diag(wanted))


@pytest.mark.parametrize("x64", [False, True])
def test_a_token_that_32_bits_do_not_hold_has_no_row(x64):
    """JAX would make token 1 of 2^32 + 1."""
    signed = [np.array([large, 3]) for large in (2**32 + 1, -(2**32) + 1)]
    with jax.enable_x64(x64):
        for tokens in (*signed, np.array([2**63 + 1, 3], np.uint64)):
            rows = ops.embedding(table(np.float32), tokens)
            np.testing.assert_array_equal(jnp.isnan(rows).all(axis=1), [True, False])
