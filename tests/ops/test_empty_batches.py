"""A batch without rows or tokens has a result without rows, and gradients of zero."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import ops

D, HEAD = 16, 8
W = np.ones((D, D), np.float32)


def layer(x, w):
    """Each op that has a row for each token."""
    norm = ops.Norm(jnp.ones(D))
    x, q, k, v = ops.norm_qkv(x, norm, (w,) * 3, head_dim=HEAD, rotary=ops.Rotary())
    k = ops.rotate(k, jnp.arange(x.shape[1]), ops.Rotary())
    x = x + ops.attention_linear(q, k, v, w, precision="coat_lean")
    x = ops.gated_mlp(x, norm, w, w, w)
    x = ops.mlp(x, norm, w, w)
    x = ops.norm_linear(ops.norm(x, norm), norm, w)
    return ops.activate(ops.linear(x, w))


@pytest.mark.parametrize("shape", [(0, 5, D), (2, 0, D)], ids=["no sequence", "no token"])
def test_a_batch_without_elements_has_gradients_of_zero(shape):
    @jax.jit
    def gradients(x, w):
        def loss(x, w):
            hidden = layer(x, w)
            labels = jnp.zeros(shape[:2], jnp.int32)
            return ops.cross_entropy(hidden, w, labels)

        return jax.value_and_grad(loss, argnums=(0, 1))(x, w)

    loss, (dx, dw) = gradients(jnp.zeros(shape), W)
    assert loss == 0
    assert dx.shape == shape
    assert not jnp.any(dw)
