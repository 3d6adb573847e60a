"""Laws of recomputation from FP8: an exact result, and gradients at the rounded input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops_cases import assert_equal, draw

from coat_jax import ops
from coat_jax.numerics.blocks import from_blocks, to_blocks

X, W = draw(0, (3, 40), (40, 40))


def layer(x, weights, shift):
    return x + jnp.tanh(x @ weights["w"]) * shift


def rounded(x, block, stochastic=True):
    return from_blocks(to_blocks(x, size=block, stochastic=stochastic), size=block)


@pytest.mark.parametrize("how", [{}, {"stochastic": False}], ids=["default", "to nearest"])
def test_the_result_is_exact_and_gradients_are_those_at_the_rounded_input(how):
    @jax.jit
    def results(x, *arguments):
        found, wanted = [], []
        for block in (16, 128):
            y, pull = jax.vjp(ops.recompute(layer, block=block, **how), x, *arguments)
            _, at_rounded = jax.vjp(layer, rounded(x, block, **how), *arguments)
            found.append((y, pull(jnp.cos(y))))
            wanted.append((layer(x, *arguments), at_rounded(jnp.cos(y))))
        return found, wanted

    assert_equal(*results(X, {"w": W}, np.float32(0.5)))
    assert np.any(np.asarray(rounded(X, 16, **how)) != np.asarray(X))


def test_the_input_is_saved_in_fp8_with_a_scale_for_every_16_values():
    _, pull = jax.vjp(ops.recompute(jnp.tanh), X)
    shapes = {leaf.dtype.name: leaf.shape for leaf in jax.tree.leaves(pull) if leaf.ndim}
    assert shapes == {"float8_e4m3fn": (3, 40), "uint8": (3, 3)}


def test_integers_may_stand_beside():
    def looked_up(x, table, places):
        return x * table[places]

    again = ops.recompute(looked_up)
    places = jnp.array([3, 0, 3])
    got = jax.grad(lambda x, w: jnp.sum(again(x, w, places)), argnums=1)(X, W)
    want = jax.grad(lambda x, w: jnp.sum(looked_up(x, w, places)), argnums=1)(rounded(X, 16), W)
    assert_equal(got, want)


def test_a_result_may_be_a_tree_of_any_dtypes():
    def function(x):
        return {"wide": x.astype(jnp.float32) @ W, "narrow": x}

    x = X.astype(jnp.bfloat16)
    y, pull = jax.vjp(ops.recompute(function), x)
    _, wanted = jax.vjp(function, x)
    (dx,), (at_x,) = pull(y), wanted(y)
    assert dx.dtype == at_x.dtype == jnp.bfloat16
    assert_equal(dx, at_x)  # function is linear
