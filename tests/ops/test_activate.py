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

F = 40
PRECISIONS = {"bf16": coat.BF16, "coat": coat.COAT, "coat_paper": coat.COAT_PAPER}


@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS)
@pytest.mark.parametrize("name", ["silu", "relu2"])
def test_it_computes_its_formula_from_the_saved_values(precision, name):
    act = ops.ACTIVATIONS[name]
    gate, up = draw(1, (2, 3, F), (2, 3, F))

    def saved(x, *, antithetic=False):
        how = {"stochastic": precision.saves_stochastically, "antithetic": antithetic}
        return through(x, precision.forward, precision.block, **how)

    def f(gate, up):
        settings = {"activation": name, "precision": precision}
        return ops.activate(gate, up, **settings), ops.activate(gate, **settings)

    def want(gate, up):
        def formula(gate, up):
            return act(gate) * up, act(gate)

        rounded = formula(saved(gate), saved(up, antithetic=True))
        if not precision.exact_forward:
            return rounded
        # The value is that of the inputs, the gradient that of what is saved.
        exact = formula(gate, up)
        return tuple(r + jax.lax.stop_gradient(e - r) for e, r in zip(exact, rounded, strict=True))

    same_gradients(f, want, gate, up)


@pytest.mark.parametrize("name", ["silu", "relu"])
def test_errors_of_gate_and_up_partly_cancel_in_the_recomputed_product(name):
    """It is closer than with independent errors, which those of a flipped up are."""
    gate, up = draw(2, (256, 64), (256, 64))
    act = ops.ACTIVATIONS[name]
    mode = mode_of(coat.COAT, "xla")

    def recomputed(gate, up):
        saved, _ = save_activation((gate, up), name, mode)
        return [from_blocks(h, size=16) for h in saved.hidden]

    g, u = quick_jit(recomputed)(gate, up)
    _, flipped = quick_jit(recomputed)(gate, up[::-1])
    want = act(gate) * up
    together, independent = (np.linalg.norm(act(g) * saved - want) for saved in (u, flipped[::-1]))
    assert together < 0.8 * independent


def test_it_saves_one_byte_a_value_and_one_for_each_block():
    gate = jnp.ones((4, 64), jnp.bfloat16)
    _, pull = jax.vjp(ops.activate, gate, gate)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(pull)) == 2 * 4 * (64 + 64 // 16)


def test_gate_and_up_have_one_shape_and_dtype():
    gate = jnp.ones((2, 8))
    for up in (jnp.ones((2, 4)), jnp.ones((2, 8), jnp.bfloat16)):
        with pytest.raises(ValueError, match=r"activate got gate float32\[2, 8\] and up"):
            ops.activate(gate, up)
    with pytest.raises(ValueError, match="activation='mish' must be one of"):
        ops.activate(gate, activation="mish")
