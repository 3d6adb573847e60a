"""Laws of a frozen weight with an adapter."""

import jax
import jax.numpy as jnp
import numpy as np
from ops_cases import distance, draw, pulled

from coat_jax import ops

K, N, R = 64, 48, 16
X, W, A, C, BIAS = draw(0, (4, 8, K), (K, N), (K, R), (R, N), (N,))


def test_it_is_linear_with_an_adapter_and_so_are_its_gradients():
    """Three products in FP8 of `linear`, and one as it comes."""

    def ours(x, a, c, bias):
        return ops.adapted_linear(x, ops.freeze(W), (a, c), bias)

    def of_linear(x, a, c, bias):
        y, h = ops.linear(x, (W, a), (bias, None))
        return y + h @ c

    for c in (C, 0 * C):  # a zero adapter changes nothing
        (y, gradients, _), (y_want, want, _) = (pulled(f, X, A, c, BIAS) for f in (ours, of_linear))
        np.testing.assert_allclose(y, y_want, rtol=1e-5, atol=1e-4)
        used = [0, 1, 2, 3] if c is C else [0, 2, 3]  # a has no gradient while c is zero
        # Sums in another order can move a gradient to the next code of E5M2, by a quarter.
        assert np.all(distance([gradients[i] for i in used], [want[i] for i in used]) < 0.02)


def test_the_backward_pass_computes_no_gradient_of_the_weight():
    frozen = jax.jit(ops.freeze)(W)

    def loss(a):
        return jnp.sum(ops.adapted_linear(X, frozen, (a, C)) ** 2)

    def trained(w):
        return jnp.sum(ops.linear(X, (w, A))[0] ** 2)

    def products_of_the_weights_shape(f, x):
        lines = jax.jit(jax.grad(f)).lower(x).as_text().splitlines()
        return [line for line in lines if "dot_general" in line and f"-> tensor<{K}x{N}x" in line]

    assert not products_of_the_weights_shape(loss, A)
    assert products_of_the_weights_shape(trained, W)


def test_codes_are_fp8_and_zero_stays_zero():
    frozen = ops.freeze(jnp.zeros((16, 16)).at[0, 0].set(3.0))
    assert frozen.codes.dtype == jnp.float8_e4m3fn
    decoded = frozen.codes.astype(jnp.float32) * frozen.scale
    assert decoded[0, 0] == 3.0
    assert not decoded[1:].any()
