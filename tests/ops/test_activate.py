"""Laws of an activation by itself: the plain formula on x, or in FP8 on what blocks make of x."""

import jax
import jax.numpy as jnp
import pytest
from ops_cases import draw, same_gradients, through

import coat_jax as coat
from coat_jax import ops

F = 40
PRECISIONS = {"bf16": coat.BF16, "coat": coat.COAT, "coat_paper": coat.COAT_PAPER}


@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS)
@pytest.mark.parametrize("name", ["silu", "relu2"])
def test_it_computes_its_formula_from_the_saved_values(precision, name):
    act = ops.ACTIVATIONS[name]
    gate, up = draw(1, (2, 3, F), (2, 3, F))

    def saved(x):
        stochastic = precision.saves_stochastically
        return through(x, precision.forward, precision.block, stochastic=stochastic)

    def f(gate, up):
        settings = {"activation": name, "precision": precision}
        return ops.activate(gate, up, **settings), ops.activate(gate, **settings)

    def want(gate, up):
        def formula(gate, up):
            return act(gate) * up, act(gate)

        rounded = formula(saved(gate), saved(up))
        if not precision.exact_forward:
            return rounded
        # The value is that of the inputs, the gradient that of what is saved.
        exact = formula(gate, up)
        return tuple(r + jax.lax.stop_gradient(e - r) for e, r in zip(exact, rounded, strict=True))

    same_gradients(f, want, gate, up)


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
