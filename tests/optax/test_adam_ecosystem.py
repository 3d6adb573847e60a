"""fp8_adamw inside optax's wrappers: each must find a transformation like any other.

The law is always the same: wrapped, it does exactly what it does alone on what the wrapper hands
on. One leaf, in 8 bits, is enough to see that.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from steps import assert_equal, normal

from coat_jax.optax import Storage, fp8_adamw, fp8_muon

FP8 = Storage(min_size=0)
SHAPE = (4, 256)


@pytest.fixture
def params():
    return {"w": normal(0, SHAPE)}


def path_of(tx, params, grads):
    """The updates and states of consecutive steps from the same parameters."""
    update, state = jax.jit(tx.update), jax.jit(tx.init)(params)
    updates, states = [], []
    for g in grads:
        step, state = update(g, state, params)
        updates.append(step)
        states.append(state)
    return updates, states


def test_injected_numbers_change_nothing_until_they_are_changed(params):
    grads = [{"w": normal(i, SHAPE)} for i in (1, 2)]
    plain, _ = path_of(fp8_adamw(1e-2, b1=0.8, weight_decay=0.1, storage=FP8), params, grads)
    tx = optax.inject_hyperparams(fp8_adamw, static_args=("storage",))(
        1e-2, b1=optax.constant_schedule(0.8), weight_decay=0.1, storage=FP8
    )
    injected, states = path_of(tx, params, grads)
    numbers = states[-1].hyperparams
    assert set(numbers) == {"learning_rate", "b1", "b2", "eps", "eps_root", "weight_decay"}
    assert all(isinstance(number, jax.Array) for number in numbers.values())
    # b2 = 0.999 as an FP32 array is off by 2^-26, which 1 - b2 makes 2e-5.
    np.testing.assert_allclose(injected[0]["w"], plain[0]["w"], rtol=3e-5, atol=1e-9)
    assert np.mean(np.abs(injected[1]["w"] - plain[1]["w"])) < 1e-5
    numbers["learning_rate"] = numbers["learning_rate"] / 2
    before = states[-1]._replace(hyperparams={**numbers, "learning_rate": jnp.float32(1e-2)})
    once, half = (jax.jit(tx.update)(grads[0], s, params)[0] for s in (before, states[-1]))
    np.testing.assert_array_equal(once["w"], 2 * half["w"])


@pytest.mark.parametrize("make", [fp8_adamw, fp8_muon])
def test_numbers_that_are_injected_in_fp16_leave_zeros_alone(make):
    """In FP16 eps is zero, and so are the numbers that zero gradients are divided by."""
    fixed = {"storage", "ns_steps", "ns_dtype"} & set(inspect.signature(make).parameters)
    tx = optax.inject_hyperparams(make, static_args=fixed)(1e-2, weight_decay=0.0, storage=FP8)
    params = {"w": jnp.ones((16, 32), jnp.float16), "b": jnp.ones(32, jnp.float16)}
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(tx.update)(zeros, tx.init(params), params)
    assert_equal(updates, zeros)


def test_a_number_that_is_rounded_out_of_its_range_says_where_it_was_rounded():
    """0.999 is 1 in BF16."""
    tx = optax.inject_hyperparams(fp8_adamw, static_args=("storage",))(1e-2, storage=FP8)
    with pytest.raises(ValueError, match=r"b2=1\.0 is outside .* hyperparam_dtype=jnp\.float32"):
        tx.init({"w": jnp.ones((16, 32), jnp.bfloat16)})


def test_partitions_are_stepped_as_if_alone_and_rounded_with_noise_of_their_own(params):
    groups = {"x": fp8_adamw(1e-2, storage=FP8), "y": fp8_adamw(1e-2, storage=FP8)}
    tx = optax.partition({**groups, "sgd": optax.sgd(0.5)}, {"a": "x", "b": "y", "c": "sgd"})
    grads = [normal(1, SHAPE), normal(2, SHAPE)]
    together = [dict.fromkeys("abc", g) for g in grads]
    updates, states = path_of(tx, dict.fromkeys("abc", params["w"]), together)
    alone, _ = path_of(groups["x"], {"a": params["w"]}, [{"a": g} for g in grads])
    for got, wanted, grad in zip(updates, alone, grads, strict=True):
        np.testing.assert_array_equal(got["a"], wanted["a"])
        np.testing.assert_array_equal(got["c"], -0.5 * grad)
    leaves = [leaf for leaf in jax.tree.leaves(states[0]) if leaf.shape == SHAPE]
    _, of_a, _, of_b = (leaf.astype(jnp.float32) for leaf in leaves)  # mu, nu; mu, nu
    assert jnp.mean(of_a != of_b) > 0.1
