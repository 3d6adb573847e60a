"""Derivatives through steps: exact through one, refused through more.

eps is 1, because with a small one Adam's first step is the sign of the gradient, and its
derivative nothing but rounding errors.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from coat_jax.optax import Storage, compress, fp8_adamw, in_place

PARAMS = {"w": jax.device_put(np.float32(np.random.default_rng(0).standard_normal((4, 256))))}
GRADS = jax.device_put(np.float32(np.random.default_rng(1).standard_normal((4, 256))))
FP8, FP32 = Storage(min_size=0), Storage(min_size=10**12)
ADAMW = optax.adamw(1e-2, eps=1.0)
OURS = {
    "fp8_adamw": lambda storage: fp8_adamw(1e-2, eps=1.0, storage=storage),
    "compress": lambda storage: compress(ADAMW, storage=storage),
}


def loss_after(tx, grads, steps):
    params, state = PARAMS, tx.init(PARAMS)
    for i in range(steps):
        updates, state = tx.update({"w": (i + 1) * grads}, state, params)
        params = optax.apply_updates(params, updates)
    return jnp.sum(jnp.square(params["w"]))


def derivatives(tx, steps, scale=1.0):
    """Backwards, and forwards along the gradients."""

    def loss(grads):
        return scale * loss_after(tx, grads, steps)

    return jax.jit(lambda g: (jax.grad(loss)(g), jax.jvp(loss, (g,), (g,))[1]))(GRADS)


def assert_close(got, wanted):
    gradient, tangent = wanted
    np.testing.assert_allclose(got[0], gradient, atol=1e-5 * float(jnp.max(jnp.abs(gradient))))
    np.testing.assert_allclose(got[1], tangent, rtol=1e-3)  # a sum of 1024 terms of both signs


@pytest.mark.parametrize("name", OURS)
def test_through_one_step_derivatives_are_those_of_optax_and_through_two_refused(name):
    assert_close(derivatives(OURS[name](FP8), 1, 1e9), derivatives(ADAMW, 1, 1e9))
    with pytest.raises(NotImplementedError, match=r"8 bits cannot be differentiated"):
        derivatives(OURS[name](FP8), 2)
    assert_close(derivatives(OURS[name](FP32), 2), derivatives(ADAMW, 2))


def test_the_last_step_alone_can_be_differentiated():
    tx = fp8_adamw(1e-2, eps=1.0, storage=FP8)

    def loss(grads):
        _, state = tx.update({"w": grads}, tx.init(PARAMS), PARAMS)
        updates, _ = tx.update({"w": 2 * grads}, jax.lax.stop_gradient(state), PARAMS)
        return jnp.sum(updates["w"])

    assert np.all(np.isfinite(jax.jit(jax.grad(loss))(GRADS)))


def test_stochastic_rounding_has_the_derivative_of_a_cast():
    params = jnp.ones((4, 256), jnp.bfloat16)
    grads = jnp.full((4, 256), 0.5, jnp.bfloat16)

    def after(rate):
        optimizers = (in_place(optax.sgd(rate), round_params=h) for h in ("stochastic", "24_bits"))
        both = [o.step(params, grads, o.init(params))[0] for o in optimizers]
        return [jnp.sum(jnp.float32(p)) for p in both]

    np.testing.assert_allclose(jax.jit(jax.jacrev(after))(0.1), -0.5 * 4 * 256, rtol=1e-2)
