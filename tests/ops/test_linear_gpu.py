"""Products of FP8 and of 8-bit codes on a GPU, against those of a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coat_jax as coat
from coat_jax import ops
from coat_jax.ops.quantized import ACTIVATION_MODES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU"),
]


@pytest.mark.parametrize("shape", [(1, 512, 256), (17, 512, 1), (17, 1, 256), (1, 1, 1)], ids=str)
def test_single_rows_are_products_like_others(shape):
    """The same codes, summed in FP32 in another order, and rounded once to BF16: within 2^-8."""
    rows, k, n = shape
    keys = jax.random.split(jax.random.key(0), 3)
    x, w, dy = (
        jax.random.normal(key, s, jnp.bfloat16)
        for key, s in zip(keys, ((rows, k), (k, n), (rows, n)), strict=True)
    )

    def results(implementation, device):
        def product(x, w):
            return ops.linear(x, w, precision=coat.COAT, implementation=implementation)

        def run(x, w, dy):
            y, pull = jax.vjp(product, x, w)
            return y, *pull(dy)

        return jax.jit(run)(*jax.device_put((x, w, dy), device))

    on_gpu = results("triton", jax.devices("gpu")[0])
    on_cpu = results("xla", jax.devices("cpu")[0])
    for a, b in zip(map(np.float32, on_gpu), map(np.float32, on_cpu), strict=True):
        assert np.abs(a - b).max() <= 2**-8 * np.abs(b).max()


K, N = 512, 384


@pytest.mark.parametrize("rows", [1, 7, 256])
@pytest.mark.parametrize("activations", ACTIVATION_MODES)
@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_products_are_those_of_a_cpu(format, activations, rows):
    """BF16 rounds a sum to 2^-9, twice at most. INT8 sums are exact; of an FP8 one, Hopper drops up
    to 2^-13 of its largest part 16 times. And a tie may be broken otherwise, which changes one of
    512 products by a code."""
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (rows, K), jnp.bfloat16)
    w = jax.random.normal(keys[1], (K, N), jnp.bfloat16)
    static = jnp.float32(1 / 32) if activations == "static" else None
    # Made once: a weight on the other side of a tie would be another one.
    weight = ops.quantize_weight(w, format, fit="max", input_scale=static)

    def result(device):
        def layer(x, weight):
            return ops.quantized_linear(x, weight, activations=activations)

        return np.float32(jax.jit(layer)(*jax.device_put((x, weight), device)))

    on_gpu, on_cpu = (result(jax.devices(kind)[0]) for kind in ("gpu", "cpu"))
    values = np.float32(weight.codes).T * np.float32(weight.scale)
    size = np.abs(np.float32(x)) @ np.abs(values)
    limit = 2.0**-8 * np.abs(on_cpu) + 2.0**-9 * size
    assert (np.abs(on_gpu - on_cpu) <= limit).all()
