"""Single operands of products that are rounded to FP8 in a run in BF16."""

from functools import partial

import jax
import numpy as np
import pytest

import coat_jax as coat
from coat_jax import E4M3, E5M2, ops
from coat_jax.kernels import gemm
from experiments.loss_study import operands

RNG = np.random.default_rng(0)
X, W, DY = (
    jax.device_put(RNG.standard_normal(shape, np.float32)) for shape in [(6, 32), (32, 8), (6, 8)]
)


def layer(precision=coat.BF16):
    """y, and the gradients of x and w."""

    @jax.jit
    def run(x, w, dy):
        y, pull = jax.vjp(lambda x, w: ops.linear(x, w, precision=precision), x, w)
        return y, *pull(dy)

    return run(X, W, DY)


@partial(jax.jit, static_argnums=1)
def codes_and_scale(x, dtype):
    scale = gemm.tensor_scale(gemm.largest_magnitude(x), dtype)
    return gemm.operand(x, dtype, scale=scale).values, scale


def in_fp8(x, dtype):
    codes, scale = codes_and_scale(x, dtype)
    return np.float64(codes) * np.float64(scale)


@pytest.mark.parametrize("names", [(), *((name,) for name in operands.NAMES), operands.NAMES])
def test_the_products_of_a_layer_are_those_of_the_rounded_operands(names):
    def of(x, name):
        return in_fp8(x, E5M2 if name == "gradients" else E4M3) if name in names else np.float64(x)

    w, dy = of(W, "weights"), of(DY, "gradients")
    with operands.rounding(names):
        found = layer()
    want = of(X, "inputs") @ w, dy @ w.T, of(X, "recomputed").T @ dy
    for a, b in zip(found, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.max(np.abs(b)))


def test_it_ends_with_its_block():
    before = layer()
    with pytest.raises(RuntimeError, match="stopped"), operands.rounding(operands.NAMES):
        raise RuntimeError("stopped")
    for a, b in zip(layer(), before, strict=True):
        np.testing.assert_array_equal(a, b)


def test_operands_that_are_in_fp8_already_are_refused():
    with operands.rounding(["inputs"]), pytest.raises(ValueError, match="in BF16 only"):
        layer(coat.COAT)
