"""`forward_products` changes the products of the forward pass, and nothing else."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops_cases import assert_equal, draw, pulled

import coat_jax as coat
from coat_jax import ops, telemetry

ROWS, WIDTH = 24, 64
OUTLIER = np.where(np.arange(WIDTH) == 3, 100, 1)
X = np.asarray(draw(0, (2, ROWS, WIDTH))) * np.float32(OUTLIER)
WEIGHTS = draw(1, *[(WIDTH, WIDTH)] * 3, over=8)
NORM = ops.Norm(np.linspace(0.5, 2, WIDTH, dtype=np.float32))


def every_op(x, weights, precision):
    how = {"precision": precision}
    return {
        "linear": ops.linear(x, weights, **how),
        "norm_linear": ops.norm_linear(x, NORM, weights, **how),
        "norm_qkv": ops.norm_qkv(x, NORM, weights, head_dim=32, **how)[1:],
        "attention_linear": ops.attention_linear(
            *[x.reshape(2, ROWS, 2, 32)] * 3, weights[0], **how
        ),
    }


def test_the_backward_pass_is_that_of_coat():
    """To the last bit, given the gradient of the output, also with an outlier in the input."""
    (in_fp8, of_fp8, dy), *others = (
        pulled(partial(every_op, precision=precision), X, WEIGHTS)
        for precision in (coat.COAT, coat.COAT_INT8, coat.COAT_BF16_FORWARD)
    )
    assert dy.keys() == in_fp8.keys()
    for forward, backward, _ in others:
        for name in in_fp8:
            assert np.any(np.asarray(forward[name]) != np.asarray(in_fp8[name])), name
        assert_equal(backward, of_fp8)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bf16", "fp32"])
def test_in_bf16_the_forward_pass_is_that_of_the_precision_bf16(dtype):
    x, weights = jax.tree.map(lambda array: jnp.asarray(array, dtype), (X, WEIGHTS))

    def forward(precision):
        found = every_op(x, weights, precision)
        gate, up, down = weights
        found["gated_mlp"] = ops.gated_mlp(x, NORM, gate, up, down, precision=precision)
        found["mlp"] = ops.mlp(x, NORM, up, down, precision=precision)
        return found

    compiled = jax.jit(forward, static_argnums=0)
    assert_equal(compiled(coat.COAT_BF16_FORWARD), compiled(coat.BF16))


def test_telemetry_sees_where_outliers_spoil_the_product():
    """One column of 64 is ten times larger, and its weights as much smaller: all count alike.

    The error of an operand is that of the product if only this operand is rounded.
    """
    normal = np.random.default_rng(0).standard_normal
    x, w = normal((64, 1024), np.float32), normal((1024, 128), np.float32) / 32
    x[:, ::64] *= 10
    w[::64] /= 10

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
    assert max(errors) > 0.04


def rounded(rows):
    """Each row to the nearest multiples of a 127th of its largest element."""
    steps = np.max(np.abs(rows), axis=1, keepdims=True) / 127
    return np.round(rows / steps) * steps
