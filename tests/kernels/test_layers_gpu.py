"""The kernels of a layer on a GPU, against their references."""

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("jax_triton")
from layer_laws import LARGE, LARGE_ROTARY_CASES, ROTARY_CASES, SMALL, LayerLaws

import coat_jax as coat
from coat_jax import ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU"),
]


class TestKernels(LayerLaws):
    shapes = hidden = SMALL + LARGE
    heads = ROTARY_CASES + LARGE_ROTARY_CASES


@pytest.mark.parametrize(
    "precision",
    [coat.COAT, coat.COAT_LEAN, coat.COAT_INT8, coat.COAT_BF16_FORWARD, coat.COAT_PAPER],
)
@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
@pytest.mark.parametrize("limit", [None, 1.0])
def test_what_is_not_finite_stays_so_forward_and_backward(precision, value, limit):
    """A row with NaN or infinity has no finite results, and so its gradient."""
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (256, 512), jnp.bfloat16).at[3, 5].set(value)
    w = [0.05 * jax.random.normal(key, (512, 512), jnp.bfloat16) for key in keys[1:]]

    def layer(x):
        how = {"limit": limit, "residual": False, "precision": precision}
        return ops.gated_mlp(x, ops.Norm(jnp.ones(512, jnp.bfloat16)), *w, **how)

    y, pull = jax.vjp(layer, x)
    (dx,) = pull(jnp.ones_like(y))
    assert not jnp.isfinite(y[3]).any()
    assert not jnp.isfinite(dx[3]).any()
