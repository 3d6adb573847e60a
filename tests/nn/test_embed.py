"""An embedding is Flax's, but for the precision in which its gradient is summed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import coat_jax as coat

V, D = 32, 8
INDICES = jax.device_put(np.int32([[0, 5, 5], [V - 1, -1, -V]]))


def both(rows=V, **settings):
    return [kind(rows, D, rngs=nnx.Rngs(0), **settings) for kind in (coat.nn.Embed, nnx.Embed)]


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16])
def test_it_computes_what_flax_does(dtype, param_dtype):
    ours, theirs = both(dtype=dtype, param_dtype=param_dtype)
    got, wanted = ours(INDICES), theirs(INDICES)
    assert got.dtype == wanted.dtype
    np.testing.assert_array_equal(got, wanted)
    np.testing.assert_array_equal(ours.attend(got), theirs.attend(wanted))
    states = nnx.state(ours), nnx.state(theirs)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, *states))


@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16])
def test_the_gradient_of_a_frequent_token_is_a_sum_in_fp32(param_dtype):
    """Flax's, computed in BF16, stands still at 256 times what is added."""
    tokens, gradients = jnp.full(1000, 3), []
    for layer in both(dtype=jnp.bfloat16, param_dtype=param_dtype):
        grads = nnx.grad(lambda layer: layer(tokens).sum(dtype=jnp.float32))(layer)
        gradients.append(np.float32(grads["embedding"][...][3]))
    np.testing.assert_array_equal(gradients[0], np.full(D, 1000.0))
    np.testing.assert_array_equal(gradients[1], np.full(D, 256.0))


def test_a_single_row_is_that_of_flax():
    """All numbers mean it, and its gradient is a sum over all of them."""
    numbers = jnp.arange(-3, 997)
    ours, theirs = both(1, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(ours(numbers), theirs(numbers))
    grads = nnx.grad(lambda layer: layer(numbers).sum(dtype=jnp.float32))(ours)
    np.testing.assert_array_equal(grads["embedding"][...][0], np.full(D, 1000.0))


def test_a_number_that_32_bits_do_not_hold_has_no_row():
    """JAX would make 1 of 2^32 + 1."""
    rows = both()[0](np.array([2**32 + 1, -(2**32) + 1, V, -V - 1, 3, -1]))
    np.testing.assert_array_equal(jnp.isnan(rows).all(axis=1), [True] * 4 + [False] * 2)


def test_numbers_must_be_whole():
    with pytest.raises(TypeError, match="whole numbers, not float32"):
        both()[0](jnp.zeros(2))
