"""Laws of an activation by itself: the plain formula on x, or in FP8 on what blocks make of x."""

import jax
import jax.numpy as jnp
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


def test_it_saves_one_byte_a_value_and_one_for_each_block():
    gate = jnp.ones((4, 64), jnp.bfloat16)
    _, pull = jax.vjp(ops.activate, gate, gate)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(pull)) == 2 * 4 * (64 + 64 // 16)
