"""A mask fits the parameters, or one line says where it does not."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from coat_jax.optax import fp8_adamw, fp8_muon, in_place

PARAMS = {
    "layer": {"w": np.ones((256, 128), np.float32), "b": np.ones(128, np.float32)},
    "head": np.ones((128, 256), np.float32),
}
PARAMS = jax.device_put(PARAMS)


def fused(*arguments, **settings):
    return in_place(fp8_adamw(*arguments, **settings))


def run(make, mask):
    """Traces a step with this mask."""
    name = "weight_decay_mask" if make is fp8_muon else "mask"
    tx = make(1e-3, **{name: mask}, weight_decay=0.1)
    if make is fused:
        return jax.eval_shape(lambda p: tx.step(p, p, tx.init(p)), PARAMS)
    return jax.eval_shape(lambda p: tx.update(p, tx.init(p), p), PARAMS)


MAKERS = (fp8_adamw, fused, fp8_muon)
WRONG = [
    {"layer": True},
    {"layer": {"w": True, "bias": True}, "head": True},
    [True, False, True],
    {"layer": None, "head": True},
]


@pytest.mark.parametrize("make", MAKERS)
def test_a_mask_that_does_not_fit_is_refused(make):
    for mask in WRONG:
        for given in (mask, lambda params, mask=mask: mask):
            with pytest.raises(ValueError, match="pytree structure error"):
                run(make, given)
    for mask in (True, {"layer": False, "head": True}, jax.tree.map(lambda p: p.ndim > 1, PARAMS)):
        run(make, mask)


def test_a_mask_may_name_what_others_update():
    labels = {"layer": "coat", "head": "other"}
    for mask in (True, {"layer": {"w": True, "b": False}, "head": True}):
        tx = optax.partition({"coat": fp8_adamw(1e-3, mask=mask), "other": optax.sgd(1.0)}, labels)
        jax.eval_shape(lambda p, tx=tx: tx.update(p, tx.init(p), p), PARAMS)


@pytest.mark.parametrize("make", [fp8_adamw, fused])
def test_an_entry_holds_for_all_parameters_below_it(make):
    """Without gradients only decay moves parameters."""
    optimizer = make(1e-3, mask={"layer": False, "head": True}, weight_decay=0.1)

    def moved(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        if make is fp8_adamw:
            return optimizer.update(zeros, optimizer.init(params), params)[0]
        after, _ = optimizer.step(params, zeros, optimizer.init(params))
        return jax.tree.map(jnp.subtract, after, params)

    found = jax.tree.map(lambda change: bool(jnp.any(change)), jax.jit(moved)(PARAMS))
    assert found == {"layer": {"w": False, "b": False}, "head": True}


def test_a_module_that_can_be_called_is_a_tree():
    """As optax has it: the fused step would otherwise call the module with the parameters."""

    @jax.tree_util.register_dataclass
    @dataclass
    class Module:
        w: Any

        def __call__(self, x):
            raise AssertionError

    params, mask = Module(jnp.ones((4, 128))), Module(np.bool_(False))
    optimizer = fused(1e-3, mask=mask, weight_decay=0.5)
    zeros = Module(jnp.zeros((4, 128)))
    stepped, _ = optimizer.step(params, zeros, optimizer.init(params))
    np.testing.assert_array_equal(stepped.w, params.w)
