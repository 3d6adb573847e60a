"""Laws of the module whose weight is in 8 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from coat_jax import nn, ops

K, N = 64, 32


def quantized_weight():
    values = np.random.default_rng(0).standard_normal((K, N), np.float32)
    return jax.jit(lambda values: ops.quantize_weight(values, "fp8"))(values)


@pytest.fixture(scope="module")
def weight():
    return quantized_weight()


@pytest.mark.parametrize("activations", ["none", "dynamic"])
def test_it_is_the_op(weight, activations):
    bias = nnx.Param(jnp.arange(N, dtype=jnp.float32))
    module = nn.QuantizedLinear(weight, bias=bias, activations=activations)
    x = np.random.default_rng(1).standard_normal((2, 3, K), np.float32)
    op = jax.jit(lambda *args: ops.quantized_linear(*args, activations=activations))
    np.testing.assert_array_equal(nnx.jit(module)(x), op(x, weight, bias[...]))


def test_bad_arguments_are_refused_when_the_layer_is_made(weight):
    with pytest.raises(ValueError, match="activations='some' must be one of none, static"):
        nn.QuantizedLinear(weight, activations="some")
    with pytest.raises(ValueError, match="needs a weight with an input_scale"):
        nn.QuantizedLinear(weight, activations="static")
    with pytest.raises(TypeError, match=r"QuantizedLinear takes a weight from coat\.ops\.quant"):
        nn.QuantizedLinear(jnp.ones((N, K)))


def test_nothing_of_its_weight_is_a_parameter(weight):
    module = nn.QuantizedLinear(weight)
    assert not jax.tree.leaves(nnx.state(module, nnx.Param))
    assert module.nbytes == K * N + 4 * N
    scaled = nn.QuantizedLinear(weight._replace(input_scale=jnp.float32(1)), activations="static")
    assert scaled.nbytes == module.nbytes + 4


def test_codes_are_sharded_as_the_weight_was():
    """Its axes are those of the weight, inputs first; codes have outputs first."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        module = nn.QuantizedLinear(quantized_weight(), sharding=("x", "y"))
        of = nnx.get_named_sharding(nnx.state(module), mesh)
    assert of["codes"].get_value().spec == jax.P("y", "x")
    assert of["scale"].get_value().spec == jax.P("y")
