"""Laws of a frozen weight with an adapter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coat_jax as coat
from coat_jax import ops
from coat_jax.errors import UserError

K, N, R = 64, 48, 16


@pytest.fixture(scope="module")
def arrays() -> dict[str, jax.Array]:
    shapes = {"x": (4, 8, K), "w": (K, N), "a": (K, R), "c": (R, N), "bias": (N,)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {
        name: jax.random.normal(key, shape)
        for (name, shape), key in zip(shapes.items(), keys, strict=True)
    }


def both(arrays: dict[str, jax.Array], x: jax.Array, a: jax.Array, c: jax.Array):
    """The op, and what it should equal: three products in FP8 of `linear`, one as it comes."""
    frozen = ops.freeze(arrays["w"])
    ours = ops.adapted_linear(x, frozen, (a, c), arrays["bias"])
    y, h = ops.linear(x, (arrays["w"], a), (arrays["bias"], None))
    return ours, y + h @ c


def test_freezing_loses_nothing_more_than_linear_does(arrays):
    ours, expected = jax.jit(both)(arrays, arrays["x"], arrays["a"], arrays["c"])
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-4)


def test_gradients_are_those_of_linear(arrays):
    @jax.jit
    def gradients(*args):
        losses = [lambda *args, i=i: jnp.sum(jnp.sin(both(arrays, *args)[i])) for i in (0, 1)]
        return [jax.grad(loss, argnums=(0, 1, 2))(*args) for loss in losses]

    of_op, of_linear = jax.device_get(gradients(arrays["x"], arrays["a"], arrays["c"]))
    for ours, expected in zip(of_op, of_linear, strict=True):
        # Sums in another order can move a gradient to the next code of E5M2, by a quarter.
        assert np.linalg.norm(ours - expected) < 0.02 * np.linalg.norm(expected)
        assert np.linalg.norm(expected) > 0


def test_the_backward_pass_computes_no_gradient_of_the_weight(arrays):
    frozen = ops.freeze(arrays["w"])

    def loss(a):
        return jnp.sum(ops.adapted_linear(arrays["x"], frozen, (a, arrays["c"])) ** 2)

    def trained(w):
        return jnp.sum(ops.linear(arrays["x"], (w, arrays["a"]))[0] ** 2)

    def products_of_the_weights_shape(f, x):
        lines = jax.jit(jax.grad(f)).lower(x).as_text().splitlines()
        return [line for line in lines if "dot_general" in line and f"-> tensor<{K}x{N}x" in line]

    assert not products_of_the_weights_shape(loss, arrays["a"])
    assert products_of_the_weights_shape(trained, arrays["w"])


def test_a_zero_adapter_changes_nothing(arrays):
    @jax.jit
    def results(x, w, a):
        adapter = a, jnp.zeros((R, N))
        return ops.adapted_linear(x, ops.freeze(w), adapter), ops.linear(x, w)

    ours, expected = results(arrays["x"], arrays["w"], arrays["a"])
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-4)


def test_codes_are_fp8_and_zero_stays_zero():
    frozen = ops.freeze(jnp.zeros((16, 16)).at[0, 0].set(3.0))
    assert frozen.codes.dtype == jnp.float8_e4m3fn
    decoded = frozen.codes.astype(jnp.float32) * frozen.scale
    assert decoded[0, 0] == 3.0
    assert not decoded[1:].any()


@pytest.mark.parametrize(
    ("precision", "shape"), [("bf16", (16, 16)), ("coat", (16,)), ("coat", (2, 16, 16))]
)
def test_only_a_matrix_in_fp8_can_be_frozen(precision, shape):
    with pytest.raises(ValueError, match=r"freeze rounds (a|one) weight"):
        ops.freeze(jnp.ones(shape), precision=precision)


@pytest.mark.parametrize(
    ("precision", "multiplies"),
    [
        (coat.BF16, "without FP8"),
        (coat.Precision(forward=coat.E5M2, backward=coat.E4M3), "in float8_e5m2"),
        (coat.Precision(forward="E3M4"), "in E3M4"),
    ],
)
def test_a_precision_that_does_not_fit_the_codes(precision, multiplies, arrays):
    adapter = arrays["a"], arrays["c"]
    said = rf"float8_e4m3fn, but this precision multiplies {multiplies}\. Freeze it with the "
    with pytest.raises(ValueError, match=said):
        ops.adapted_linear(arrays["x"], ops.freeze(arrays["w"]), adapter, precision=precision)


def test_a_bias_that_does_not_fit_the_codes(arrays):
    adapter = arrays["a"], arrays["c"]
    with pytest.raises(ValueError, match="should be"):
        ops.adapted_linear(arrays["x"], ops.freeze(arrays["w"]), adapter, jnp.ones(3))


def test_int8_forward_is_refused(arrays):
    """Before a model is frozen, and where one is called that was frozen otherwise."""
    said = r"FP8 codes are multiplied, and int8_forward .* Use .* such as coat.COAT"
    with pytest.raises(UserError, match=f"freeze is .* {said}"):
        ops.freeze(arrays["w"], precision=coat.COAT_INT8)
    frozen, adapter = ops.freeze(arrays["w"]), (arrays["a"], arrays["c"])
    with pytest.raises(UserError, match=f"adapted_linear is .* {said}"):
        ops.adapted_linear(arrays["x"], frozen, adapter, precision=coat.COAT_INT8)
