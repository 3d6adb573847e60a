"""With `int8_forward` only the products of the forward pass change."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import OPTIONS

import coat_jax as coat
from coat_jax import ops, telemetry

ROWS, WIDTH = 24, 64
RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, ROWS, WIDTH), np.float32)
X[:, :, 3] *= 100
X, *W = jax.device_put([X, *RNG.standard_normal((3, WIDTH, WIDTH), np.float32) / 8])
NORM = ops.Norm(jax.device_put(np.linspace(0.5, 2, WIDTH, dtype=np.float32)))
OPS = {
    "linear": lambda x, w, p: ops.linear(x, w, precision=p),
    "norm_linear": lambda x, w, p: ops.norm_linear(x, NORM, w, precision=p),
    "norm_qkv": lambda x, w, p: ops.norm_qkv(x, NORM, w, head_dim=32, precision=p),
    "attention_linear": lambda x, w, p: ops.attention_linear(
        *[x.reshape(2, ROWS, 2, 32)] * 3, w[0], precision=p
    ),
}


@pytest.mark.costly
@pytest.mark.parametrize("name", OPS)
def test_the_backward_pass_is_that_of_coat(name):
    """To the last bit, given the gradient of the output, also with an outlier in the input."""

    def pulled(precision):
        def run(x, w):
            y, pull = jax.vjp(lambda x, w: OPS[name](x, w, precision), x, w)
            random = partial(jax.random.normal, jax.random.key(4))
            return y, pull(jax.tree.map(lambda leaf: random(leaf.shape), y))

        return jax.jit(run, compiler_options=OPTIONS)(X, tuple(W))

    (y_int8, of_int8), (y_fp8, of_fp8) = pulled(coat.COAT_INT8), pulled(coat.COAT)
    assert any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (y_int8, y_fp8)), strict=True))
    for got, want in zip(*map(jax.tree.leaves, (of_int8, of_fp8)), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.costly
@pytest.mark.parametrize(("factor", "warned"), [(1, False), (3, False), (10, True), (1000, True)])
def test_telemetry_sees_where_outliers_spoil_the_product(factor, warned):
    """One column of 64 is larger, and its weights as much smaller, so that all count alike.

    The error of an operand is that of the product if only this operand is rounded.
    """
    normal = np.random.default_rng(0).standard_normal
    x, w = normal((64, 1024), np.float32), normal((1024, 128), np.float32) / 32
    x[:, ::64] *= factor
    w[::64] /= factor

    def loss(w):
        with telemetry.named("layer"):
            return jnp.sum(ops.linear(x, w, precision=coat.COAT_INT8))

    found = telemetry.measure(loss, w)
    errors = [found[f"layer/{name}"].error for name in ("input", "weight")]
    product = jax.jit(partial(ops.linear, precision=coat.COAT_INT8))(x, w)
    x, w = np.float64(x), np.float64(w)

    def error(product):
        return np.linalg.norm(product - x @ w) / np.linalg.norm(x @ w)

    assert errors[0] == pytest.approx(error(rounded(x) @ w), rel=0.1)
    assert errors[1] == pytest.approx(error(x @ rounded(w.T).T), rel=0.1)
    assert np.hypot(*errors) == pytest.approx(error(product), rel=0.1)
    assert (max(errors) > 0.04) == warned


def rounded(rows):
    """Each row to the nearest multiples of a 127th of its largest element."""
    steps = np.max(np.abs(rows), axis=1, keepdims=True) / 127
    return np.round(rows / steps) * steps
