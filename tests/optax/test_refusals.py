"""What cannot work is refused with what arrived, what is required and how to get there."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from coat_jax.numerics import noise
from coat_jax.optax import (
    Storage,
    compress,
    fp8_adamw,
    fused_fp8_adamw,
    in_place,
    scale_by_fp8_adam,
    with_corrections,
)

FP8 = Storage(min_size=0)
EVERY_INIT = {
    "scale_by_fp8_adam": scale_by_fp8_adam().init,
    "fp8_adamw": fp8_adamw(1e-3).init,
    "fused_fp8_adamw": fused_fp8_adamw(1e-3).init,
    "compress": compress(optax.lion(1e-3)).init,
}
every_init = pytest.mark.parametrize("init", EVERY_INIT.values(), ids=EVERY_INIT)


@pytest.mark.parametrize("size", [0, -128, 100, 2048, 128.0, True, "128", None])
def test_group_sizes_are_powers_of_two_from_16_to_1024(size):
    with pytest.raises(
        ValueError, match=r"group_size=.* must be a whole number among 16, 32, .*1024\."
    ):
        Storage(group_size=size)


@pytest.mark.parametrize("name", ["min_size", "seed"])
@pytest.mark.parametrize("value", [-1, 0.5, True, "0", None])
def test_sizes_and_seeds_are_whole_numbers(name, value):
    with pytest.raises(ValueError, match=f"{name}=.* must be a whole number"):
        Storage(**{name: value})


def test_seeds_have_32_bits():
    """The hash of the random numbers has no more, so a larger seed would repeat a smaller one."""
    assert noise.leaf_key(2**32, 1, 0) == noise.leaf_key(0, 1, 0)
    assert noise.leaf_key(2**32 - 1, 1, 0) != noise.leaf_key(0, 1, 0)
    with pytest.raises(ValueError, match=r"seed=4294967296 must be .* from 0 to 4,294,967,295"):
        Storage(seed=2**32)
    Storage(seed=2**32 - 1)


@pytest.mark.parametrize("name", ["first", "second", "other"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3b11fnuz, "fp8", None, 8])
def test_formats_of_moments_are_few(name, dtype):
    with pytest.raises(ValueError, match=r"is not a format of an optimizer's moments. Use .*E4M3"):
        Storage(**{name: dtype})


@every_init
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bool_, jnp.uint8])
def test_integers_are_no_parameters(init, dtype):
    with pytest.raises(TypeError, match=r"\['steps'\] has dtype .* Leave it out with optax.masked"):
        init({"w": jnp.ones((4, 128)), "steps": jnp.zeros((3,), dtype)})


@every_init
def test_complex_numbers_are_no_parameters(init):
    with pytest.raises(TypeError, match=r"\['w'\] is complex \(complex64\).*split_real_and_imag"):
        init({"w": jnp.ones((4, 128), jnp.complex64)})


@pytest.mark.parametrize("make", [fp8_adamw, fused_fp8_adamw])
def test_numbers_in_fp8_are_no_parameters(make):
    init = make(1e-3).init
    with pytest.raises(TypeError, match=r"has dtype float8_e4m3fn, .* BF16 or FP32"):
        init({"w": jnp.ones((4, 128), jnp.float8_e4m3fn)})


def test_complex_and_integer_gradients_are_refused():
    tx = scale_by_fp8_adam(storage=FP8)
    state = tx.init({"w": jnp.ones((4, 128))})
    with pytest.raises(TypeError, match="complex"):
        tx.update({"w": jnp.ones((4, 128), jnp.complex64)}, state)
    with pytest.raises(TypeError, match="int32"):
        tx.update({"w": jnp.ones((4, 128), jnp.int32)}, state)


BAD_NUMBERS = [
    ("learning_rate", -1e-3, r"0 <= learning_rate < inf"),
    ("learning_rate", float("nan"), r"0 <= learning_rate < inf"),
    ("b1", 1.0, r"0 <= b1 < 1"),
    ("b1", -0.1, r"0 <= b1 < 1"),
    ("b2", 1, r"0 <= b2 < 1"),
    ("b2", 1.5, r"0 <= b2 < 1"),
    ("eps", -1e-8, r"0 <= eps < inf"),
    ("eps_root", -1.0, r"0 <= eps_root < inf"),
    ("weight_decay", -0.1, r"0 <= weight_decay < inf"),
    ("weight_decay", float("inf"), r"0 <= weight_decay < inf"),
]
MAKERS = [fp8_adamw, fused_fp8_adamw, scale_by_fp8_adam]


def parameters(make):
    return inspect.signature(make).parameters


@pytest.mark.parametrize(
    ("make", "name", "value", "message"),
    [(make, *bad) for make in MAKERS for bad in BAD_NUMBERS if bad[0] in parameters(make)],
)
def test_numbers_outside_their_range_are_refused(make, name, value, message):
    arguments = {"learning_rate": 1e-3} if "learning_rate" in parameters(make) else {}
    with pytest.raises(ValueError, match=f"{name}=.* is outside its range, {message}"):
        make(**{**arguments, name: value})


PARAMS = {"w": np.ones((4, 128), np.float32), "b": np.ones(8, np.float32)}


def wrong_gradients():
    w, b = PARAMS["w"], PARAMS["b"]
    return {
        "a leaf missing": ({"w": w}, "another structure"),
        "a leaf too many": ({"w": w, "b": b, "c": b}, "another structure"),
        "another name": ({"w": w, "bias": b}, "another structure"),
        "transposed": ({"w": w.T, "b": b}, r"\['w'\] has shape \(128, 4\).*made for \(4, 128\)"),
        "broadcastable": ({"w": w[:1], "b": b}, r"\['w'\] has shape \(1, 128\)"),
        "flat": ({"w": w.ravel(), "b": b}, r"\['w'\] has shape \(512,\)"),
    }


@pytest.mark.parametrize("case", wrong_gradients())
def test_gradients_of_another_model_are_refused(case):
    grads, message = wrong_gradients()[case]
    tx = fp8_adamw(1e-3, storage=FP8)
    with pytest.raises(ValueError, match=message):
        tx.update(grads, tx.init(PARAMS), grads)
    fused = fused_fp8_adamw(1e-3, storage=FP8)
    with pytest.raises(ValueError, match=message):
        fused.step(PARAMS, grads, fused.init(PARAMS))
    with pytest.raises(ValueError, match=message):
        fused.step(grads, PARAMS, fused.init(PARAMS))


def test_unknown_implementations_are_refused():
    makers = scale_by_fp8_adam, partial(fp8_adamw, 1e-3), partial(fused_fp8_adamw, 1e-3)
    for make in (*makers, partial(compress, optax.lion(1e-3))):
        with pytest.raises(ValueError, match='must be None, "xla" or "triton", not \'cuda\''):
            make(implementation="cuda")


def test_weight_decay_needs_parameters():
    tx = fp8_adamw(1e-3)
    with pytest.raises(ValueError, match="params"):
        tx.update(PARAMS, tx.init(PARAMS))


@pytest.mark.parametrize(
    ("value", "columns"),
    [(np.nan, slice(200, 201)), (np.inf, slice(128, 256)), (-np.inf, slice(128, 256))],
)
def test_a_gradient_that_is_not_finite_spoils_no_more_than_is_documented(value, columns):
    """NaN its own element; infinity its element, and its group of 128 as an outlier.

    optax.apply_if_finite skips such steps.
    """
    params = {"w": jnp.float32(np.random.default_rng(0).standard_normal((2, 256)))}
    tx = fp8_adamw(1e-3, storage=FP8)
    update = jax.jit(tx.update)
    good = {"w": params["w"]}
    bad = {"w": params["w"].at[1, 200].set(value)}
    _, state = update(good, tx.init(params), params)
    spoilt = np.zeros((2, 256), bool)
    spoilt[1, columns] = True
    for grads in (bad, good, good):
        updates, state = update(grads, state, params)
        not_finite = np.argwhere(~np.isfinite(updates["w"])).tolist()
        assert not_finite == ([[1, 200]] if grads is bad else [])
        # Adam's steps are about as long as the learning rate: the others keep their scale.
        assert np.all(np.abs(updates["w"][~spoilt]) < 3e-3)
        assert np.mean(np.abs(updates["w"][~spoilt])) > 0.5e-3


WRAPPERS = {
    "compress": compress,
    "in_place": in_place,
    "with_corrections": with_corrections,
}


def stepped_with(wrapped, state):
    if hasattr(wrapped, "step"):
        return wrapped.step(PARAMS, PARAMS, state)
    return wrapped.update(PARAMS, state, PARAMS)


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_the_state_of_another_transformation_is_named(wrap):
    adamw, lion = wrap(optax.adamw(1e-3)), wrap(optax.lion(1e-3))
    with pytest.raises(ValueError, match=r"structure .*ScaleByLionState.*: it was made by another"):
        stepped_with(adamw, lion.init(PARAMS))


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_state_for_parameters_of_another_shape_is_named(wrap):
    tx = wrap(optax.sgd(1e-3, momentum=0.9))
    state = tx.init(PARAMS | {"w": jnp.ones((3, 5))})
    with pytest.raises(
        ValueError, match=r"\['w'\].* for (other parameters|a parameter of another)"
    ):
        stepped_with(tx, state)


def test_other_errors_of_a_transformation_are_its_own():
    def needs_numbers(params):
        assert float(jnp.sum(params["b"])) > 0
        return ()

    for init in (lambda params: (), needs_numbers):
        broken = optax.GradientTransformation(init, lambda g, s, p=None: 1 + "a")
        for wrap in (in_place, with_corrections):
            with pytest.raises(TypeError, match="unsupported operand"):
                stepped_with(wrap(broken), wrap(broken).init(PARAMS))
