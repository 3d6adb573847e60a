"""The kernels of a layer on a GPU, against their references."""

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("jax_triton")
from layer_cases import (
    ACTIVATIONS,
    LARGE,
    LARGE_ROTARY_CASES,
    NORMS,
    ROTARY_CASES,
    ROUNDINGS,
    SMALL,
    STREAMS,
    check_activation,
    check_cast,
    check_exact_activation,
    check_exact_activation_in_int8,
    check_int8_columns,
    check_int8_rows,
    check_norm,
    check_rotary,
)

import coat_jax as coat
from coat_jax import ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU"),
]


@STREAMS
@pytest.mark.parametrize("dtype", [coat.E4M3, coat.E5M2], ids=["E4M3", "E5M2"])
@pytest.mark.parametrize("shape", SMALL + LARGE, ids=str)
def test_cast(shape, dtype, stream):
    check_cast(shape, dtype, stream)


@STREAMS
@pytest.mark.parametrize("dtype", [coat.E4M3, coat.E5M2], ids=["E4M3", "E5M2"])
@pytest.mark.parametrize(
    ("shape", "heads", "head", "per_sequence"), ROTARY_CASES + LARGE_ROTARY_CASES
)
def test_rotary(shape, heads, head, per_sequence, dtype, stream):
    check_rotary(shape, heads, head, dtype, per_sequence=per_sequence, stream=stream)


@pytest.mark.parametrize("case", NORMS, ids=str)
@pytest.mark.parametrize("shape", SMALL + LARGE, ids=str)
def test_norm(shape, case):
    check_norm(shape, case)


@ROUNDINGS
@pytest.mark.parametrize("shape", SMALL + LARGE, ids=str)
@pytest.mark.parametrize(("name", "count"), ACTIVATIONS)
def test_activation(shape, name, count, stochastic):
    check_activation(shape, name, count, stochastic=stochastic)


@ROUNDINGS
@pytest.mark.parametrize("shape", SMALL + LARGE, ids=str)
@pytest.mark.parametrize(("name", "count"), ACTIVATIONS)
def test_exact_activation(shape, name, count, stochastic):
    check_exact_activation(shape, name, count, stochastic=stochastic)


@pytest.mark.parametrize("shape", SMALL + LARGE, ids=str)
@pytest.mark.parametrize(("name", "count"), ACTIVATIONS)
def test_exact_activation_in_int8(shape, name, count):
    check_exact_activation_in_int8(shape, name, count)


@pytest.mark.parametrize("shape", SMALL + LARGE, ids=str)
def test_int8_columns(shape):
    check_int8_columns(shape)


@pytest.mark.parametrize("shape", SMALL + LARGE, ids=str)
def test_int8_rows(shape):
    check_int8_rows(shape)


@pytest.mark.parametrize("precision", [coat.COAT, coat.COAT_LEAN, coat.COAT_INT8, coat.COAT_PAPER])
@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_what_is_not_finite_stays_so_forward_and_backward(precision, value):
    """A row with NaN or infinity has no finite results, and so its gradient."""
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (256, 512), jnp.bfloat16).at[3, 5].set(value)
    w = [0.05 * jax.random.normal(key, (512, 512), jnp.bfloat16) for key in keys[1:]]

    def layer(x):
        return ops.gated_mlp(
            x, ops.Norm(jnp.ones(512, jnp.bfloat16)), *w, residual=False, precision=precision
        )

    y, pull = jax.vjp(layer, x)
    (dx,) = pull(jnp.ones_like(y))
    assert not jnp.isfinite(y[3]).any()
    assert not jnp.isfinite(dx[3]).any()
