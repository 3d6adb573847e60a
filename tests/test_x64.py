"""With `jax_enable_x64`, numbers that nobody asked for in FP64 stay in FP32."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import coat_jax as coat
from coat_jax.optax import (
    Stage,
    fp8_adamw,
    global_norm,
    global_norm_scale,
    in_place,
    step_by_stages,
)


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def parameters():
    values = np.random.default_rng(0).standard_normal((16, 32))
    return {"w": jnp.asarray(values, jnp.float32), "b": jnp.asarray(values[0], jnp.bfloat16)}


def test_norms_are_in_fp32():
    grads = parameters()
    assert global_norm(grads).dtype == global_norm_scale(grads, 1.0).dtype == jnp.float32
    assert global_norm_scale(grads, np.float64(1.0)).dtype == jnp.float32


def test_the_norm_of_a_step_by_stages_clips_the_next_one_in_a_loop():
    optimizer = in_place(fp8_adamw(1e-2))
    stages = [
        Stage(lambda params: params["w"], lambda w, _: jnp.sum(w, axis=0)),
        Stage(lambda params: params["b"], lambda b, x: jnp.mean(x * b.astype(jnp.float32))),
    ]

    def step(carry, _):
        params, state, norm = carry
        done = step_by_stages(optimizer, stages, params, state, grad_scale=1 / norm)
        return (done.params, done.state, done.gradient_norm), done.loss

    params = parameters()
    before = params, optimizer.init(params), jnp.float32(1)
    assert jax.lax.scan(step, before, length=2)[1].dtype == jnp.float32


@pytest.mark.parametrize("how", ["stochastic", "24_bits"])
def test_bf16_parameters_follow_a_schedule_in_fp64(how):
    """2^-10 is the same number in both."""
    params = parameters()

    @jax.jit
    def after(params):
        return [
            optimizer.step(params, params, optimizer.init(params))
            for rate in (lambda _: jnp.float64(2**-10), lambda _: jnp.float32(2**-10))
            for optimizer in [
                in_place(fp8_adamw(rate, storage=coat.Storage(min_size=0)), round_params=how)
            ]
        ]

    jax.tree.map(np.testing.assert_array_equal, *after(params))


def test_a_factor_in_fp64_scales_gradients_in_place():
    params = {"w": parameters()["w"]}
    optimizer = in_place(optax.adam(1e-2))
    state = optimizer.init(params)
    after = [
        optimizer.step(params, params, state, grad_scale=scale)
        for scale in (jnp.float64(2**-10), jnp.float32(2**-10))
    ]
    jax.tree.map(np.testing.assert_array_equal, *after)
    assert {leaf.dtype for leaf in jax.tree.leaves(after[0][0])} == {np.dtype("float32")}


@pytest.mark.parametrize("over", ["group", "block"])
def test_a_limit_that_is_searched_is_in_fp32(over):
    quantizer = coat.quantizer.Quantizer("E4M3", over=over, size=16, fit="mse")
    x = parameters()["w"]
    found = jax.jit(quantizer.limit_of)(x)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(jax.jit(quantizer)(x), jax.jit(quantizer.quantize)(x, found))
