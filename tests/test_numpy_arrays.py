"""NumPy's arrays, also in FP64, are what `jnp.asarray` makes of them, without a warning."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coat_jax as coat
from coat_jax import ops

X = np.random.default_rng(0).standard_normal((4, 32))
W = np.random.default_rng(1).standard_normal((32, 8))


CASES = {
    "quantized_linear": lambda x, w: ops.quantized_linear(x, ops.quantize_weight(w, fit="max")),
    "adapted_linear": lambda x, w: ops.adapted_linear(
        x, ops.freeze(w), tuple(map(jnp.asarray, (w[:, :2], w[:2])))
    ),
    "Quantizer": lambda x, w: coat.quantizer.Quantizer("E4M3")(x),
}


@pytest.mark.parametrize("name", CASES)
def test_numpy_arrays_in_fp64_count_as_fp32(name):
    # In one program, in which arrays of NumPy stay what they are: they are no arguments of it.
    both = jax.jit(lambda: (CASES[name](X, W), CASES[name](jnp.asarray(X), jnp.asarray(W))))
    found, wanted = both()
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, wanted)
