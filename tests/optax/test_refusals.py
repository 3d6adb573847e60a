"""Parameters, gradients and states that do not fit are refused with what arrived and a remedy."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from coat_jax.optax import (
    Storage,
    compress,
    fp8_adamw,
    in_place,
    scale_by_fp8_adam,
    with_rounding,
)

FP8 = Storage(min_size=0)
PARAMS = {"w": np.ones((4, 128), np.float32), "b": np.ones(8, np.float32)}
NO_PARAMETERS = {
    jnp.int32: r"\['steps'\] has dtype .* leave it out with optax.masked",
    jnp.bool_: r"\['steps'\] has dtype .* leave it out with optax.masked",
    jnp.complex64: r"\['steps'\] has dtype complex64.*split_real_and_imag",
    jnp.float8_e4m3fn: r"has dtype float8_e4m3fn.* BF16 or FP32",
}


@pytest.mark.parametrize("dtype", NO_PARAMETERS)
def test_only_real_floats_of_16_bits_and_more_are_parameters_and_gradients(dtype):
    params = {"w": jnp.ones((4, 128)), "steps": jnp.zeros((3,), dtype)}
    for tx in (scale_by_fp8_adam(), fp8_adamw(1e-3), in_place(fp8_adamw(1e-3))):
        with pytest.raises(TypeError, match=NO_PARAMETERS[dtype]):
            tx.init(params)
    if dtype != jnp.float8_e4m3fn:
        with pytest.raises(TypeError, match=NO_PARAMETERS[dtype]):
            compress(optax.lion(1e-3)).init(params)
    tx = scale_by_fp8_adam(storage=FP8)
    with pytest.raises(TypeError, match=jnp.dtype(dtype).name):
        tx.update(params, tx.init({**params, "steps": jnp.zeros(3)}))


W, B = PARAMS.values()
WRONG_GRADIENTS = {
    "a leaf missing": ({"w": W}, r"\['b'\] is (missing|not expected)"),
    "another name": ({"w": W, "bias": B}, r"\['b.*\] is (missing|not expected)"),
    "transposed": ({"w": W.T, "b": B}, r"\['w'\] is .*\[(128, 4|4, 128)\] instead of"),
    "broadcastable": ({"w": W[:1], "b": B}, r"\['w'\] is .* instead of"),
}


@pytest.mark.parametrize("case", WRONG_GRADIENTS)
def test_gradients_of_another_model_are_refused(case):
    grads, message = WRONG_GRADIENTS[case]
    tx = fp8_adamw(1e-3, storage=FP8)
    fused = in_place(tx)
    with pytest.raises(ValueError, match=message):
        tx.update(grads, tx.init(PARAMS), grads)
    for params, gradients in ((PARAMS, grads), (grads, PARAMS)):
        with pytest.raises(ValueError, match=message):
            fused.step(params, gradients, fused.init(PARAMS))


def in_24_bits(tx):
    return with_rounding(tx, "24_bits")


WRAPPERS = {"compress": compress, "in_place": in_place, "with_rounding": in_24_bits}


def stepped_with(wrapped, state):
    if hasattr(wrapped, "step"):
        return wrapped.step(PARAMS, PARAMS, state)
    return wrapped.update(PARAMS, state, PARAMS)


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_the_state_of_another_transformation_or_of_other_parameters_is_named(wrap):
    adamw, lion = wrap(optax.adamw(1e-3)), wrap(optax.lion(1e-3))
    with pytest.raises(ValueError, match=r"\.nu.* is missing.* made by another"):
        stepped_with(adamw, lion.init(PARAMS))
    tx = wrap(optax.sgd(1e-3, momentum=0.9))
    state = tx.init(PARAMS | {"w": jnp.ones((3, 5))})
    with pytest.raises(ValueError, match=r"\['w'\].* for other parameters"):
        stepped_with(tx, state)


def test_other_errors_of_a_transformation_are_its_own():
    def needs_numbers(params):
        assert float(jnp.sum(params["b"])) > 0
        return ()

    for init in (lambda params: (), needs_numbers):
        broken = optax.GradientTransformation(init, lambda g, s, p=None: 1 + "a")
        for wrap in (in_place, in_24_bits):
            with pytest.raises(TypeError, match="unsupported operand"):
                stepped_with(wrap(broken), wrap(broken).init(PARAMS))
