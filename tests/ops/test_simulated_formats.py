"""Laws of training in formats that no hardware has.

The bias of a format does not matter beside a scale that is a power of two. So E4M3 and E5M2 with
another bias must give what the FP8 dtypes give, through other code: dtypes of JAX on one side,
`Minifloat` and values in BF16 on the other. What is known of FP8 thus holds for the simulation.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops_cases import (
    FP8_PRESETS,
    WIDTH,
    assert_close,
    distance,
    draw,
    layer,
    layer_params,
    pulled,
    weight,
)
from small_model import SMALL

import coat_jax as coat
from coat_jax import ops
from coat_jax.numerics import blocks
from coat_jax.numerics.minifloat import minifloat
from coat_jax.numerics.quantizer import Quantizer
from coat_jax.training import families
from coat_jax.training.config import to_json

TWINS = {"forward": "E4M3:bias=9", "backward": "E5M2:bias=13"}


def linear(precision):
    return jax.jit(partial(ops.linear, precision=precision))


@pytest.mark.costly
@pytest.mark.parametrize(
    "name", ["fp8_linear", "coat_int8", "coat_lean, rounded forward", "coat_lean"]
)
def test_a_layer_computes_as_in_the_fp8_dtypes(name):
    preset = FP8_PRESETS[name]
    twin = dataclasses.replace(preset, **TWINS)
    assert twin.simulated
    arguments = layer_params(), draw(1, (2, 8, WIDTH))
    got, want = (pulled(partial(layer, precision=p), *arguments)[:2] for p in (twin, preset))
    # Sums of a tensor run in another order, and a number between two codes may go either way.
    assert np.all(distance(got, want) < 1e-3)


def test_blocks_are_those_of_the_quantizer():
    names = "E2M1", "E3M4", "E0M7", "E8M3", "E5M10", "E4M0"
    x = draw(0, (8, 64)) * jnp.exp2(jnp.arange(8) * 12.0 - 42)[:, None]

    @jax.jit
    def both(x):
        stored = {name: blocks.to_blocks(x, minifloat(name), size=16) for name in names}
        values = {name: blocks.from_blocks(one, size=16) for name, one in stored.items()}
        wanted = {name: Quantizer(minifloat(name), "block", size=16)(x) for name in names}
        return stored, values, wanted

    stored, values, wanted = both(x)
    for name in names:
        assert stored[name].codes.dtype == minifloat(name).container
        np.testing.assert_array_equal(values[name], wanted[name])


def test_a_product_is_that_of_the_rounded_operands():
    x, w = draw(1, (5, 24)), weight(2, 24, 16)
    precision = coat.Precision(forward="E2M3", backward="E3M2", block=None)
    y, (dx, dw), dy = pulled(partial(ops.linear, precision=precision), x, w)

    def rounded(array, name):
        fmt = minifloat(name)
        scale = 2.0 ** np.ceil(np.log2(np.abs(array).max() / fmt.max))
        return np.asarray(jax.jit(fmt.round)(array / scale), np.float64) * scale

    x, w, dy = rounded(x, "E2M3"), rounded(w, "E2M3"), rounded(dy, "E3M2")
    assert_close((y, dx, dw), (x @ w, dy @ w.T, x.T @ dy), 1e-5)


def test_wide_formats_neither_overflow_nor_underflow():
    x, w = draw(1, (8, 32)) * 2.0**60, weight(2, 32, 8) * 2.0**-60
    precision = coat.Precision(forward="E8M7", backward="E8M7", block=None)
    assert_close(linear(precision)(x, w), x @ w, 2.0**-7)


def test_a_config_is_written_with_the_names_of_its_formats():
    precision = coat.Precision(forward="E3M4", backward="E5M2:none")
    config = dataclasses.replace(SMALL, precision=precision)
    written = to_json(config)
    assert written["precision"]["forward"] == "E3M4"
    assert families.from_json(written, "config").precision == precision
