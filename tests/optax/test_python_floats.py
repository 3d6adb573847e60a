"""Parameters and gradients may be Python floats, as they may be in optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from coat_jax import optax as ours

PARAMS = {"scale": 1.5, "biases": [0.5, -2.0]}
GRADS = {"scale": -0.25, "biases": [1.0, 0.5]}


def transformation(tx):
    def run(params, grads):
        updates, _ = tx.update(grads, tx.init(params), params)
        return optax.apply_updates(params, updates)

    return run


def in_one_step(optimizer):
    return lambda params, grads: optimizer.step(params, grads, optimizer.init(params))[0]


ADAMW = optax.adamw(1e-2)
RUNS = {
    "fp8_adamw": transformation(ours.fp8_adamw(1e-2)),
    "fp8_muon": transformation(ours.fp8_muon(1e-2)),
    "compress": transformation(ours.compress(ADAMW)),
    "with_corrections": transformation(ours.with_corrections(ADAMW)),
    "stochastic_round_updates": transformation(optax.chain(ADAMW, ours.stochastic_round_updates())),
    "apply_updates": lambda params, grads: ours.apply_updates(params, grads, step=1),
    "fused_fp8_adamw": in_one_step(ours.fused_fp8_adamw(1e-2)),
    "in_place": in_one_step(ours.in_place(ADAMW)),
    "in_place, rounding": in_one_step(ours.in_place(ADAMW, round_params=True)),
    "in_place, correcting": in_one_step(ours.in_place(ADAMW, correct_params=True)),
    "in_host_memory": in_one_step(ours.in_host_memory(ours.in_place(ADAMW))),
    "clipping": lambda params, grads: ours.global_norm_scale(grads, 1.0),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_float_is_an_array_without_axes(name):
    """Outside of jit, which makes arrays of floats."""
    arrays = jax.tree.map(jnp.float32, (PARAMS, GRADS))
    for found, wanted in zip(
        jax.tree.leaves(RUNS[name](PARAMS, GRADS)),
        jax.tree.leaves(RUNS[name](*arrays)),
        strict=True,
    ):
        assert found.dtype == jnp.float32
        np.testing.assert_array_equal(found, wanted)
