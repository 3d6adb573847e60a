"""Laws of a linear layer whose weight is 8-bit codes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import ops
from coat_jax.errors import UserError
from coat_jax.kernels import gemm
from coat_jax.ops.quantized import ACTIVATION_MODES

K, N, ROWS = 96, 40, (2, 5)
FORMATS = pytest.mark.parametrize("format", ["int8", "fp8"])
MODES = pytest.mark.parametrize("activations", ACTIVATION_MODES)


quantize_weight = jax.jit(ops.quantize_weight, static_argnames=("format", "fit"))
quantized_linear = jax.jit(ops.quantized_linear, static_argnames="activations")


def arrays(dtype=np.float32):
    """In NumPy, as all that is not tried here: JAX compiles a program for each operation."""
    normal = np.random.default_rng(0).standard_normal
    x, w, bias = normal((*ROWS, K)), normal((K, N)) * np.linspace(0.1, 3, N), normal(N)
    return x.astype(dtype), w.astype(dtype), bias.astype(dtype)


def quantized(w, format, activations, largest=4.0):
    scale = np.float32(largest / (127 if format == "int8" else 448))
    static = scale if activations == "static" else None
    return quantize_weight(w, format, fit="max", input_scale=static)


def decoded(weight):
    return np.asarray(weight.codes, np.float64).T * np.asarray(weight.scale, np.float64)


def rounded(x, weight, format, activations):
    """The input as its codes stand for it, in FP64."""
    x = np.asarray(x, np.float64)
    if activations == "none":
        return x
    limit = 127 if format == "int8" else 448
    scale = np.abs(x).max(axis=-1, keepdims=True) / limit
    if activations == "static":
        scale = np.float64(weight.input_scale)
    if format == "int8":
        return np.clip(np.rint(x / scale), -128, 127) * scale
    return np.clip(x / scale, -448, 448).astype(jnp.float8_e4m3fn).astype(np.float64) * scale


@FORMATS
@MODES
def test_it_is_the_product_of_the_decoded_values(format, activations):
    """But for FP32 sums, and for codes on the other side of a tie: x / scale is rounded, too."""
    x, w, bias = arrays()
    weight = quantized(w, format, activations)
    y = quantized_linear(x, weight, bias, activations=activations)
    exact = rounded(x, weight, format, activations) @ decoded(weight) + np.asarray(bias, np.float64)
    size = np.abs(rounded(x, weight, format, activations)) @ np.abs(decoded(weight))
    assert y.dtype == x.dtype
    np.testing.assert_array_less(np.abs(y - exact), K * 2.0**-23 * size + 1e-6)


def test_products_of_int8_codes_are_exact():
    x = jnp.full((2, 4096), -128, jnp.int8)
    w = jnp.full((3, 4096), 127, jnp.int8)
    y = gemm.product_of_codes(x, w, jnp.bfloat16)
    assert y.dtype == jnp.int32
    np.testing.assert_array_equal(y, -128 * 127 * 4096)


def test_a_sum_that_int32_may_not_hold_is_refused():
    shape = jax.ShapeDtypeStruct((1, gemm.MOST_INT8_COLUMNS + 1), jnp.int8)
    with pytest.raises(ValueError, match="131071 is the most"):
        jax.eval_shape(lambda a: gemm.product_of_codes(a, a, jnp.float32), shape)


@FORMATS
def test_a_result_of_ordinary_size_is_right_whatever_the_sizes_of_input_and_weight(format):
    for of_x in (1e35, 1e-35):
        x, w = (
            np.abs(one) * np.float32(by)
            for one, by in zip(arrays()[:2], (of_x, 1 / of_x), strict=True)
        )
        got = quantized_linear(x, quantize_weight(w, format), activations="dynamic")
        np.testing.assert_allclose(got, np.float64(x) @ np.float64(w), rtol=0.05)


@FORMATS
@MODES
def test_nan_and_infinity_become_finite_only_where_they_saturate(format, activations):
    x, w, _ = arrays()
    weight = quantized(w, format, activations)
    for lost in (np.nan, np.inf):
        x[0, 1, 7] = lost
        finite = np.isfinite(quantized_linear(x, weight, activations=activations))
        saturates = activations == "static" and lost == np.inf
        assert np.all(finite[0, 1] == saturates)
        assert finite[0, 0].all()
        assert finite[1].all()


@FORMATS
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bits_round_sums_and_no_more(format, dtype):
    """Sums of FP8 codes exceed FP16; they are scaled before they are rounded to it."""
    x, w, bias = arrays(dtype)
    weight = quantized(w * 100, format, "dynamic")
    y = np.float32(quantized_linear(x, weight, bias))
    wide = np.asarray(quantized_linear(x.astype(np.float32), weight, bias))
    # Two roundings of a sum, each by half a unit in the last place at most.
    unit = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(y, wide, rtol=1.1 * unit, atol=1.1 * unit * float(abs(wide).max()))
    assert np.isfinite(y).all()


@FORMATS
def test_weights_alone_in_8_bits_exceed_fp16_no_earlier_than_their_sums(format):
    """Codes are up to 448 times as large as what they stand for, and so are the sums of them."""
    x, w = np.full((2, 1024), 3, np.float16), np.full((1024, 3), 0.02, np.float32)
    y = quantized_linear(x, quantized(w, format, "none"), activations="none")
    assert y.dtype == jnp.float16
    np.testing.assert_allclose(np.float32(y), 3 * 1024 * 0.02, rtol=2**-10)


@FORMATS
def test_gradients_are_right_or_refused(format):
    """Of a cast to integers JAX would make zero."""
    x, w, _ = arrays()

    def loss(x, activations):
        weight = quantized(w, format, activations)
        return jnp.sum(ops.quantized_linear(x, weight, activations=activations))

    expected = decoded(quantized(w, format, "none")).sum(axis=1)
    ours = jax.jit(jax.grad(loss), static_argnums=1)(x, "none")
    np.testing.assert_allclose(ours, np.broadcast_to(expected, x.shape), rtol=1e-4, atol=1e-4)
    for activations in ("static", "dynamic"):
        with pytest.raises(UserError, match="rounds its activations has no gradient"):
            jax.grad(loss)(x, activations)


def test_a_weight_takes_a_byte_a_parameter_and_a_scale_a_channel():
    """To the range of which half a step is the most that INT8 loses."""
    _, w, _ = arrays()
    weight = quantize_weight(w, fit="max")
    assert (weight.codes.nbytes, weight.scale.nbytes) == (K * N, 4 * N)
    largest = np.abs(w).max(axis=0)
    np.testing.assert_array_less(np.abs(decoded(weight) - w), largest / 254 * 1.001 + 0 * w)
    np.testing.assert_array_less(np.abs(decoded(weight)), largest * 1.001 + 0 * w)
