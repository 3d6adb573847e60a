"""cuDNN's attention on a GPU, with what the op keeps of it, against XLA's."""

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

MASKS = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 70},
    "segments": {"segments": jnp.arange(2 * 256).reshape(2, 256) // 100},
    "an odd length": {},
    "all of an odd length": {"causal": False},
    "segments of an odd length": {"segments": jnp.arange(2 * 255).reshape(2, 255) // 100},
}


@pytest.mark.parametrize("preset", ["BF16", "COAT", "COAT_LEAN"])
@pytest.mark.parametrize("mask", MASKS)
def test_gradients_are_those_of_xla(mask, preset):
    """BF16 rounds within 2^-8, a few times in a row; o in blocks within 2^-4, less on average.

    The backward pass of COAT_LEAN has probabilities of rounded scores. XLA divides them by their
    sum, and cuDNN by that of the exact ones.
    """
    keys = jax.random.split(jax.random.key(0), 5)
    s = 255 if "odd" in mask else 256
    shapes = ((2, s, 4, 64), (2, s, 2, 64), (2, s, 2, 64), (256, 128), (2, s, 128))
    arrays = [
        jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)
    ]
    precision = getattr(coat, preset)

    def loss(backend, q, k, v, weight, dy):
        how = {"precision": precision, "backend": backend, **MASKS[mask]}
        y = ops.attention_linear(q, k, v, weight, **how)
        return jnp.sum((y * dy).astype(jnp.float32))

    got, want = (
        jax.jit(jax.grad(loss, argnums=(1, 2, 3, 4)), static_argnums=0)(backend, *arrays)
        for backend in ("cudnn", "xla")
    )
    bound = 0.06 if preset == "COAT_LEAN" else 0.02
    for a, b in zip(map(np.float32, got), map(np.float32, want), strict=True):
        assert np.linalg.norm(a - b) < bound * np.linalg.norm(b)
