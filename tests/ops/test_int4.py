"""Laws of a linear layer whose weight is in INT4."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import ops
from coat_jax.errors import UserError
from coat_jax.numerics import four_bits
from coat_jax.ops.quantized import ACTIVATION_MODES, quantized_linears

K, N = 256, 24
quantize_weight = jax.jit(ops.quantize_weight, static_argnames="format")
quantized_linear = jax.jit(ops.quantized_linear, static_argnames="activations")


def arrays(rows):
    normal = np.random.default_rng(0).standard_normal
    return (normal(shape).astype(np.float32) for shape in ((*rows, K), (K, N), (N,)))


def rounded(x, activations):
    if activations == "none":
        return x
    scale = np.abs(x).max(axis=-1, keepdims=True) / 448 if activations == "dynamic" else 2.0**-6
    codes = np.clip(x / scale, -448, 448).astype(jnp.float8_e4m3fn)
    return codes.astype(np.float64) * scale


@pytest.mark.parametrize("zero", [None, 3])
@pytest.mark.parametrize("rows", [(1, 1), (3, 40)])
@pytest.mark.parametrize("activations", ACTIVATION_MODES)
def test_it_is_the_product_of_what_codes_stand_for(activations, rows, zero):
    """But for sums in FP32, and for codes on the other side of a tie: x / scale is rounded, too.
    Weights with a zero are multiplied in BF16, where inputs are rounded."""
    x, w, bias = arrays(rows)
    static = jnp.float32(2.0**-6) if activations == "static" else None
    weight = quantize_weight(w, "int4", input_scale=static)
    if zero is not None:
        weight = weight._replace(zero=jnp.full(weight.scale.shape, zero, jnp.uint8))
    y = quantized_linear(x, weight, bias, activations=activations)
    values = np.asarray(four_bits.values(weight.codes, weight.scale, weight.zero), np.float64)
    exact = rounded(x, activations) @ values.T + bias
    bound = 1e-2 if activations == "dynamic" else 2e-4
    if zero is not None and activations != "none":
        bound += 2.0**-9 * float((np.abs(rounded(x, activations)) @ np.abs(values.T)).max())
    np.testing.assert_allclose(y, exact, atol=bound)


@pytest.mark.parametrize("activations", ["none", "dynamic"])
def test_several_weights_are_applied_as_each_of_them(activations):
    """One in INT8 among them, too."""
    x, w, bias = arrays((2, 3))
    weights = [quantize_weight(w, "int4"), quantize_weight(2 * w[:, :8], "int4")]
    for more in ([], [quantize_weight(w, "int8")]):
        several, biases = weights + more, [bias, None, *[None] * len(more)]
        together = jax.jit(quantized_linears, static_argnames="activations")
        found = together(x, several, biases, activations=activations)
        for y, weight, b in zip(found, several, biases, strict=True):
            expected = quantized_linear(x, weight, b, activations=activations)
            np.testing.assert_allclose(y, expected, atol=1e-5)


def test_a_row_with_a_nan_is_lost_and_no_other():
    x, w, _ = arrays((4,))
    x[2, 7] = np.nan
    y = np.asarray(quantized_linear(x, quantize_weight(w, "int4")))
    assert np.isnan(y[2]).all()
    assert np.isfinite(y[[0, 1, 3]]).all()


def test_fp16_need_not_hold_the_weight():
    """Nor a channel whose scales are all zero FP8."""
    weight = ops.quantize_weight(np.eye(128, dtype=np.float32) * 2e5, "int4")
    x = np.full((2, 128), 1e-3, np.float16)
    for activations in ("none", "dynamic"):
        np.testing.assert_allclose(
            quantized_linear(x, weight, activations=activations), 200, rtol=1e-2
        )
    lost = weight._replace(scale=weight.scale.at[3].set(0))
    assert quantized_linear(x, lost)[0, 3] == 0


def test_an_input_without_rows_has_no_results():
    _, w, _ = arrays((1,))
    assert ops.quantized_linear(jnp.ones((0, K)), quantize_weight(w, "int4")).shape == (0, N)


def test_a_weight_without_whole_groups_is_refused():
    with pytest.raises(UserError, match="with 200 inputs cannot be in INT4"):
        ops.quantize_weight(jnp.ones((200, 4)), "int4")


def test_an_input_of_another_width_is_named():
    _, w, _ = arrays((1,))
    with pytest.raises(ValueError, match=r"257 columns and .* which are for 256"):
        ops.quantized_linear(jnp.ones((2, 257)), quantize_weight(w, "int4"))


def test_gradients_of_weights_alone_are_right_and_others_refused():
    x, w, _ = arrays((4,))
    weight = quantize_weight(w, "int4")
    gradient = jax.grad(lambda x: ops.quantized_linear(x, weight, activations="none").sum())(x)
    expected = np.asarray(four_bits.values(weight.codes, weight.scale)).sum(axis=0)
    np.testing.assert_allclose(gradient, np.broadcast_to(expected, x.shape), rtol=1e-4)
    with pytest.raises(UserError, match="has no gradient"):
        jax.grad(lambda x: ops.quantized_linear(x, weight).sum())(x)
