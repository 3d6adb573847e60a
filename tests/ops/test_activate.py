"""Laws of an activation by itself: the plain formula on x, or in FP8 on what blocks make of x."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops_cases import draw, same_gradients, through

from coat_jax import ops
from coat_jax.precision import precision_of

F = 40


@pytest.mark.parametrize("precision", ["bf16", "coat", "coat_paper"])
def test_it_computes_its_formula_from_the_saved_values(precision):
    how = precision_of(precision)
    *gates, up = draw(1, *[(2, 3, F)] * 3)
    names = "silu", "relu2"

    def saved(x, *, antithetic=False):
        settings = {"stochastic": how.saves_stochastically, "antithetic": antithetic}
        return through(x, how.forward, how.block, **settings)

    def f(gates, up):
        settings = [{"activation": name, "precision": how} for name in names]
        return [
            (ops.activate(gate, up, **each), ops.activate(gate, **each))
            for gate, each in zip(gates, settings, strict=True)
        ]

    def want(gates, up):
        def formula(gate, up, name):
            return ops.ACTIVATIONS[name](gate) * up, ops.ACTIVATIONS[name](gate)

        results = []
        for gate, name in zip(gates, names, strict=True):
            rounded = formula(saved(gate), saved(up, antithetic=True), name)
            # With an exact forward pass only the gradient is that of what is saved.
            exact = formula(gate, up, name) if how.exact_forward else rounded
            pairs = zip(exact, rounded, strict=True)
            results.append(tuple(r + jax.lax.stop_gradient(e - r) for e, r in pairs))
        return results

    same_gradients(f, want, gates, up)


@pytest.mark.parametrize("precision", ["bf16", "coat"])
def test_a_value_beyond_the_limit_is_clipped_and_has_no_gradient(precision):
    """One at the limit has, and a NaN stays one."""
    nan = [np.nan] * 5
    gate = jnp.array([[0.5, 2, 4, -4, 1], nan, [1] * 5])
    up = jnp.array([[3, -2, 1, -4, 2], [1] * 5, nan])

    def f(gate, up):
        return ops.activate(gate, up, activation="relu", limit=2.0, precision=precision)

    y, pull = jax.vjp(f, gate, up)
    of_gate, of_up = pull(jnp.ones_like(y))
    np.testing.assert_array_equal(y, [[1, -4, 2, 0, 2], nan, nan])
    np.testing.assert_array_equal(of_gate[::2], [[2, -2, 0, 0, 2], nan])
    np.testing.assert_array_equal(of_up[:2], [[0, 2, 2, 0, 1], nan])


@pytest.mark.parametrize("limit", [None, 0.5])
def test_it_saves_one_byte_a_value_and_one_for_each_block(limit):
    gate = jnp.ones((4, 64), jnp.bfloat16)
    _, pull = jax.vjp(partial(ops.activate, limit=limit), gate, gate)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(pull)) == 2 * 4 * (64 + 64 // 16)
