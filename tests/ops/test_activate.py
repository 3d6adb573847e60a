"""Laws of an activation by itself: the plain formula on x, or in FP8 on what blocks make of x."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops_cases import draw, quick_jit, same_gradients, through

import coat_jax as coat
from coat_jax import ops
from coat_jax.numerics.blocks import from_blocks
from coat_jax.ops.saved.activation import save_activation
from coat_jax.ops.saved.projection import mode_of
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


def test_errors_of_gate_and_up_partly_cancel_in_the_recomputed_product():
    """It is closer than with independent errors, which those of a flipped up are."""
    gate, up = draw(2, (256, 64), (256, 64))
    mode = mode_of(coat.COAT, "xla")

    @quick_jit
    def recomputed(gate, up):
        saved = [save_activation((gate, up), name, mode)[0] for name in ("silu", "relu")]
        return [[from_blocks(h, size=16) for h in one.hidden] for one in saved]

    both = recomputed(gate, up), recomputed(gate, up[::-1])
    for name, (g, u), (_, flipped) in zip(("silu", "relu"), *both, strict=True):
        act = ops.ACTIVATIONS[name]
        together, independent = (
            np.linalg.norm(act(g) * saved - act(gate) * up) for saved in (u, flipped[::-1])
        )
        assert together < 0.8 * independent


def test_it_saves_one_byte_a_value_and_one_for_each_block():
    gate = jnp.ones((4, 64), jnp.bfloat16)
    _, pull = jax.vjp(ops.activate, gate, gate)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(pull)) == 2 * 4 * (64 + 64 // 16)
