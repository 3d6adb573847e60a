"""A norm and a gate with a vector for each sample, against plain JAX."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops_cases import assert_close, draw, same_gradients, through

import coat_jax as coat
from coat_jax import ops
from coat_jax.numerics.formats import E4M3

SHAPES = (2, 5, 48), (2, 48), (2, 48)
NEAREST = dataclasses.replace(coat.COAT, stochastic=False)


def plain(x, scale, shift, kind="layer"):
    if kind == "layer":
        x = x - jnp.mean(x, -1, keepdims=True)
    n = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    return n * (1 + scale[:, None]) + shift[:, None]


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_in_full_precision_it_is_a_norm_scaled_and_shifted(kind):
    def f(*args):
        return ops.modulated_norm(*args, kind=kind, precision="bf16")

    same_gradients(f, lambda *args: plain(*args, kind), *draw(0, *SHAPES))


def test_a_gate_is_a_product():
    x, gate, _ = draw(1, *SHAPES)
    same_gradients(
        lambda x, g: ops.gate(x, g, precision="bf16"), lambda x, g: x * g[:, None], x, gate
    )


def test_in_fp8_the_forward_pass_is_exact_and_gradients_are_those_of_what_is_saved():
    x, scale, shift = draw(0, *SHAPES)
    y, pull = jax.vjp(lambda *args: ops.modulated_norm(*args, precision=NEAREST), x, scale, shift)
    np.testing.assert_array_equal(y, ops.modulated_norm(x, scale, shift, precision="bf16"))
    rounded = through(x, E4M3, 16)
    # Statistics are those of x itself, so a little is left between the two.
    for got, wanted in zip(pull(y), jax.vjp(plain, rounded, scale, shift)[1](y), strict=True):
        assert np.linalg.norm(got - wanted) < 0.02 * np.linalg.norm(wanted)
    z, pull = jax.vjp(lambda x, g: ops.gate(x, g, precision=NEAREST), x, scale)
    assert_close(pull(z)[1], jnp.sum(z * rounded, axis=1))
    saved = jax.tree.leaves(jax.vjp(ops.gate, x, scale)[1])
    assert {leaf.dtype.name for leaf in saved if leaf.size == x.size} == {"float8_e4m3fn"}


@pytest.mark.parametrize("call", [ops.gate, lambda x, g: ops.modulated_norm(x, g, g)])
def test_vectors_are_those_of_samples(call):
    with pytest.raises(ValueError, match=r"one vector \[B, D\] for each sample"):
        call(jnp.zeros((2, 5, 48)), jnp.zeros((5, 48)))
