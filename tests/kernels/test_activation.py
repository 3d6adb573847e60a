"""The activations, and the bounds of their gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax.kernels import activation
from coat_jax.kernels.activation import ACTIVATIONS
from coat_jax.numerics import blocks

POINTS = np.linspace(-8, 8, 100_001, dtype=np.float32)


@functools.partial(jax.jit, static_argnums=0)
def largest_value_and_slope(name, x):
    function = ACTIVATIONS[name]
    return [jnp.max(jnp.abs(jax.vmap(f)(x))) for f in (function, jax.grad(function))]


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("m", [0.25, 1.5, 8.0])
def test_no_value_and_no_slope_exceeds_its_bound(name, m):
    largest = largest_value_and_slope(name, np.clip(POINTS, -m, m))
    for found, bound in zip(
        largest, activation.activation_bounds(jnp.float32(m), name), strict=True
    ):
        assert found <= bound * (1 + 1e-6)


@pytest.mark.parametrize("name", ["gelu", "relu2"])
def test_a_bound_of_a_slope_is_nearly_reached(name):
    """Within 1 %: a looser one would waste codes."""
    _, slope = largest_value_and_slope(name, POINTS)
    assert slope > 0.99 * activation.activation_bounds(jnp.float32(8.0), name)[1]


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("count", [1, 2])
def test_no_gradient_of_an_activation_s_inputs_exceeds_its_bound(name, count):
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = [3 * jax.random.normal(key, (16, 64)) for key in keys[:count]]
    stored = [blocks.to_blocks(h, size=16) for h in hidden]
    da = jax.random.normal(keys[2], (16, 64))
    gradients = activation.activate_backward(
        [blocks.from_blocks(b, size=16) for b in stored], da, name
    )
    bounds = activation.gradient_bounds(stored, jnp.max(jnp.abs(da), axis=-1), name)
    for gradient, bound in zip(gradients, bounds, strict=True):
        assert jnp.max(jnp.abs(gradient)) <= bound


def test_an_unknown_activation_is_refused():
    with pytest.raises(ValueError, match="'swish' must be one of"):
        activation.activation_bounds(jnp.float32(1.0), "swish")
