"""A kernel on a shard knows the numbers of its blocks in the whole array.

Stochastic rounding takes its random bits from them, so a mesh must not change them. Kernels do not
run here: in their place stands a function that returns the numbers they were given.
"""

import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from coat_jax import E4M3
from coat_jax.kernels import activation, norm, sharding
from coat_jax.kernels.norm import Norm

SIZE = 16
SPECS = [
    P("data", "tensor"),
    P(("data", "fsdp")),
    P(None, "fsdp", "tensor"),
    P("data", None, "tensor"),
    P(None, None, ("fsdp", "tensor")),
]


def sharded(shape, spec):
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    return jax.device_put(jnp.ones(shape, jnp.bfloat16), NamedSharding(mesh, spec))


def replace_module(monkeypatch, name, **kernels):
    """Puts something else in place of a module of kernels, which needs Triton."""
    monkeypatch.setitem(sys.modules, f"coat_jax.kernels.triton.{name}", SimpleNamespace(**kernels))


def launch(kernel, *inputs, outputs, **constants):
    """Results are zeros, but for exponents: numbers of blocks, modulo 251."""
    numbers = (kernel(inputs, constants) % 251).astype(jnp.uint8)
    return [numbers if o.dtype == jnp.uint8 else jnp.zeros(o.shape, o.dtype) for o in outputs]


def expected(shape):
    blocks = (*shape[:-1], shape[-1] // SIZE)
    return np.arange(np.prod(blocks)).reshape(blocks) % 251


def of_hidden_activations(inputs, constants):
    *_, first, within = inputs
    return first[..., None] + within


def of_the_input_of_a_norm(inputs, constants):
    return inputs[1][..., None] + jnp.arange(constants["NORM"].columns // SIZE, dtype=jnp.uint32)


@jax.jit
def activated(x):
    how = {"exact": True, "stochastic": True}
    return activation.activation_forward((x, x), activation.Limited("silu"), E4M3, SIZE, **how)[0]


@jax.jit
def normed(x):
    how = {"exact": True, "stochastic": True}
    return norm.norm_forward(x, Norm(jnp.ones(512)), jnp.float32(1), E4M3, SIZE, **how)[:1]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_kernel_is_given_the_numbers_of_its_blocks_in_the_whole_array(spec, monkeypatch):
    monkeypatch.setattr(sharding, "launch", launch)
    tile, row = of_hidden_activations, of_the_input_of_a_norm
    tiles = {"activation_forward_exact_tile": tile, "activation_forward_tile": None}
    replace_module(monkeypatch, "activation", **tiles)
    replace_module(monkeypatch, "norm", norm_forward_row=row, norm_forward_row_int8=None)
    x = sharded((4, 8, 512), spec)
    for blocks in (*activated(x), *normed(x)):
        np.testing.assert_array_equal(blocks.exponents, expected(x.shape))
