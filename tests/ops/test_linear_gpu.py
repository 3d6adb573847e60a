"""Products with a single row, column or member on a GPU, against XLA's way through FP32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coat_jax as coat
from coat_jax import ops

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
