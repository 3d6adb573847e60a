"""Derivatives through steps: exact through one, refused through more.

eps is 1, because with a small one Adam's first step is the sign of the gradient, and its
derivative nothing but rounding errors.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from coat_jax.optax import (
    Storage,
    apply_updates,
    compress,
    fp8_adamw,
    fused_fp8_adamw,
    in_place,
    stochastic_round_updates,
)

PARAMS = {"w": jax.device_put(np.float32(np.random.default_rng(0).standard_normal((4, 256))))}
GRADS = jax.device_put(np.float32(np.random.default_rng(1).standard_normal((4, 256))))
FP8, FP32 = Storage(min_size=0), Storage(min_size=10**12)
OURS = {
    "fp8_adamw": lambda storage: fp8_adamw(1e-2, eps=1.0, storage=storage),
    "compress": lambda storage: compress(optax.adamw(1e-2, eps=1.0), storage=storage),
}


def loss_after(tx, grads, steps, scale):
    params, state = PARAMS, tx.init(PARAMS)
    for i in range(steps):
        updates, state = tx.update({"w": (i + 1) * grads}, state, params)
        params = optax.apply_updates(params, updates)
    return scale * jnp.sum(jnp.square(params["w"]))


def derivative(tx, steps, scale=1.0):
    return jax.jit(jax.grad(lambda grads: loss_after(tx, grads, steps, scale)))(GRADS)


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("scale", [1.0, 1e9])
def test_through_one_step_derivatives_are_those_of_optax(name, scale):
    got, wanted = (
        derivative(OURS[name](FP8), 1, scale),
        derivative(optax.adamw(1e-2, eps=1.0), 1, scale),
    )
    np.testing.assert_allclose(got, wanted, atol=1e-5 * float(jnp.max(jnp.abs(wanted))))


@pytest.mark.parametrize("name", OURS)
def test_forwards_too(name):
    def tangent(tx):
        return jax.jit(lambda g: jax.jvp(lambda g: loss_after(tx, g, 1, 1.0), (g,), (g,))[1])(GRADS)

    np.testing.assert_allclose(
        tangent(OURS[name](FP8)), tangent(optax.adamw(1e-2, eps=1.0)), atol=1e-4
    )


@pytest.mark.parametrize("name", OURS)
def test_through_two_steps_they_are_refused(name):
    with pytest.raises(NotImplementedError, match=r"8 bits cannot be differentiated"):
        derivative(OURS[name](FP8), 2)
    got, wanted = derivative(OURS[name](FP32), 2), derivative(optax.adamw(1e-2, eps=1.0), 2)
    np.testing.assert_allclose(got, wanted, atol=1e-5 * float(jnp.max(jnp.abs(wanted))))


def test_the_last_step_alone_can_be_differentiated():
    tx = fp8_adamw(1e-2, eps=1.0, storage=FP8)

    def loss(grads):
        _, state = tx.update({"w": grads}, tx.init(PARAMS), PARAMS)
        updates, _ = tx.update({"w": 2 * grads}, jax.lax.stop_gradient(state), PARAMS)
        return jnp.sum(updates["w"])

    assert np.all(np.isfinite(jax.jit(jax.grad(loss))(GRADS)))


def test_the_fused_step_refuses_too():
    fused = fused_fp8_adamw(1e-2, eps=1.0, storage=FP8)

    def loss(grads):
        params, state = fused.step(PARAMS, {"w": grads}, fused.init(PARAMS))
        return jnp.sum(fused.step(params, {"w": grads}, state)[0]["w"])

    with pytest.raises(NotImplementedError, match=r"8 bits cannot be differentiated"):
        jax.jit(jax.grad(loss))(GRADS)


@pytest.mark.parametrize(
    "step",
    [
        lambda tx, p, g: optax.apply_updates(
            p,
            optax.chain(tx, stochastic_round_updates()).update(
                g, optax.chain(tx, stochastic_round_updates()).init(p), p
            )[0],
        ),
        lambda tx, p, g: in_place(tx, round_params=True).step(
            p, g, in_place(tx, round_params=True).init(p)
        )[0],
        lambda tx, p, g: apply_updates(p, tx.update(g, tx.init(p), p)[0], step=1),
    ],
    ids=["chain", "in_place", "apply_updates"],
)
def test_stochastic_rounding_has_the_derivative_of_a_cast(step):
    params = {"w": jnp.ones((4, 256), jnp.bfloat16)}
    grads = {"w": jnp.full((4, 256), 0.5, jnp.bfloat16)}

    def after(rate):
        return jnp.sum(jnp.float32(step(optax.sgd(rate), params, grads)["w"]))

    np.testing.assert_allclose(jax.grad(after)(0.1), -0.5 * 4 * 256, rtol=1e-2)
