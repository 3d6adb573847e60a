"""A kernel on a shard knows the numbers of its blocks in the whole array, and the largest of a row.

Stochastic rounding takes its random bits from the former, and INT8 its scales from the latter, so a
mesh must not change them. Kernels do not run here: in their place stand functions of `jnp`.
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
from coat_jax.kernels import activation, int8, norm, sharding
from coat_jax.kernels.norm import Norm
from coat_jax.numerics import eight_bits

SIZE = 16
SPECS = [
    P("data", "tensor"),
    P(("data", "fsdp")),
    P(None, "fsdp", "tensor"),
    P("data", None, "tensor"),
    P(None, None, ("fsdp", "tensor")),
]


def sharded(x, spec):
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    return jax.device_put(x, NamedSharding(mesh, spec))


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
    return activation.activation_forward((x, x), "silu", E4M3, SIZE, **how)[0]


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
    x = sharded(jnp.ones((4, 8, 512), jnp.bfloat16), spec)
    for blocks in (*activated(x), *normed(x)):
        np.testing.assert_array_equal(blocks.exponents, expected(x.shape))


def largest_of(x, columns):
    largest = jnp.max(jnp.abs(x.reshape(*x.shape[:-1], -1, columns)), axis=-1)
    return jnp.where(jnp.isfinite(largest), largest, jnp.nan)


def encode(x, largest):
    scales = eight_bits.scale_of(largest, "int8")
    return eight_bits.encode(x, jnp.repeat(scales, x.shape[-1] // scales.shape[-1], -1), "int8")


def rescale(codes, maxima, largest):
    decoded = codes * jnp.repeat(eight_bits.scale_of(maxima, "int8"), 32, -1)
    return encode(decoded, largest[..., None])


def of_rows(x):
    largest = largest_of(x, x.shape[-1])
    return encode(x, largest), largest[..., 0]


def of_rows_of_activations(gate, up, *others, ACT, TILES):
    a = activation.activate((gate, up), ACT.name)
    maxima, largest = (largest_of(a, columns) for columns in (ACT.per_maximum, TILES.columns))
    codes = encode(a, maxima)
    if TILES.columns == ACT.columns:
        codes = rescale(codes, maxima, largest[..., 0])
    return codes, maxima, largest[..., 0]


def launch_for_int8(kernel, *inputs, outputs, TILES=None, ACT=None, **constants):
    if ACT is None:
        return kernel(*inputs)
    blocks = [jnp.zeros(o.shape, o.dtype) for o in outputs[:4]]
    return [*blocks, *kernel(*inputs, TILES=TILES, ACT=ACT)]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_codes_of_int8_have_the_scales_of_whole_rows(spec, monkeypatch):
    for module in (activation, int8, sharding):
        monkeypatch.setattr(module, "launch", launch_for_int8)
    replace_module(monkeypatch, "activation", activation_forward_int8_rows=of_rows_of_activations)
    replace_module(
        monkeypatch,
        "int8",
        int8_row=of_rows,
        int8_rows_tile=lambda x, largest: [encode(x, largest[..., None])],
        int8_rescale_tile=lambda *arrays: [rescale(*arrays)],
    )
    x = jax.random.normal(jax.random.key(0), (4, 8, 512)).at[1, 2, 300].set(jnp.inf)

    def rows(x):
        how = {"stochastic": True}
        _, activated = activation.activation_forward_int8((x, x), "silu", E4M3, SIZE, **how)
        both = int8.round_rows(x, "triton"), activated
        return [each.codes * each.scale[..., None] for each in both]

    for got, want in zip(jax.jit(rows)(sharded(x, spec)), rows(x), strict=True):
        np.testing.assert_array_equal(got, want)
        assert np.flatnonzero(np.isnan(got).any(axis=(0, 2))).tolist() == [2]
