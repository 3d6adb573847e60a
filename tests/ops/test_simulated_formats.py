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
from flax import nnx
from ops_cases import FP8_PRESETS, assert_close, draw, pulled, some_norm, weight
from small_model import QUICK, SMALL, filled

import coat_jax as coat
from coat_jax import ops, telemetry
from coat_jax.errors import UserError
from coat_jax.limits import from_json
from coat_jax.models import Config
from coat_jax.numerics import blocks
from coat_jax.numerics.minifloat import minifloat
from coat_jax.numerics.quantizer import Quantizer
from coat_jax.telemetry.tensors import report, sums_and_gradients
from coat_jax.training import resume_rules

ONE_LAYER = dataclasses.replace(SMALL, layers=1, scan=False)
TOKENS = jax.device_put(np.arange(4 * 32, dtype=np.int32).reshape(4, 32) * 7 % 256)
TWINS = {"forward": "E4M3:bias=9", "backward": "E5M2:bias=13"}


def loss_and_gradients(precision):
    config = dataclasses.replace(ONE_LAYER, precision=precision, dtype=jnp.float32)
    graph, params = nnx.split(filled(config))

    def loss(params):
        return nnx.merge(graph, params).loss(TOKENS, TOKENS)

    value, gradients = jax.jit(jax.value_and_grad(loss), compiler_options=QUICK)(params)
    return value, nnx.to_pure_dict(gradients)


def linear(precision):
    return jax.jit(partial(ops.linear, precision=precision))


@pytest.mark.costly
@pytest.mark.parametrize("name", FP8_PRESETS)
def test_a_model_computes_as_in_the_fp8_dtypes(name):
    preset = FP8_PRESETS[name]
    twin = dataclasses.replace(preset, **TWINS)
    assert twin.simulated
    # Sums of a tensor run in another order, and a number between two codes may go either way.
    assert_close(loss_and_gradients(twin), loss_and_gradients(preset), 1e-4)


@pytest.mark.parametrize("name", ["E2M1", "E3M4", "E0M7", "E8M3", "E5M10", "E4M0"])
def test_blocks_are_those_of_the_quantizer(name):
    x = draw(0, (8, 64)) * jnp.exp2(jnp.arange(8) * 12.0 - 42)[:, None]
    fmt = minifloat(name)
    stored = jax.jit(partial(blocks.to_blocks, dtype=fmt, size=16))(x)
    assert stored.codes.dtype == fmt.container
    values = jax.jit(partial(blocks.from_blocks, size=16))(stored)
    np.testing.assert_array_equal(values, jax.jit(Quantizer(fmt, "block", size=16))(x))


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


@pytest.mark.parametrize(("formats", "bits"), [("E8M7", 7), ("E8M5", 5), ("E8M3", 3)])
def test_fewer_mantissa_bits_cost_accuracy_as_they_should(formats, bits):
    """Two rounded operands have relative errors of up to 2^-(bits + 1); so has their product."""
    x, w = draw(1, (64, 256)), weight(2, 256, 64)
    precision = coat.Precision(forward=formats, backward=formats, block=None)
    y, exact = linear(precision)(x, w), x @ w
    error = float(jnp.linalg.norm(y - exact) / jnp.linalg.norm(exact))
    assert 0.4 < error / (2.0 ** -(bits + 1) * (2 / 3) ** 0.5) < 1


def test_wide_formats_neither_overflow_nor_underflow():
    x, w = draw(1, (8, 32)) * 2.0**60, weight(2, 32, 8) * 2.0**-60
    precision = coat.Precision(forward="E8M7", backward="E8M7", block=None)
    assert_close(linear(precision)(x, w), x @ w, 2.0**-7)


def test_models_of_several_seeds_run_together():
    x, w = draw(1, (3, 8, 32)), draw(2, (3, 32, 16))
    alone = linear(coat.Precision(forward="E3M3", backward="E4M2"))
    together = jax.vmap(alone)(x, w)
    for i in range(3):
        assert_close(together[i], alone(x[i], w[i]))


def test_telemetry_sees_simulated_formats():
    precision = coat.Precision(forward="E2M1", backward="E3M2")
    norm, weights = some_norm("rms", 32), (weight(2, 32, 48), weight(3, 32, 48), weight(4, 48, 32))

    def loss(weights, x):
        with telemetry.named("mlp"):
            return jnp.sum(jnp.sin(ops.gated_mlp(x, norm, *weights, precision=precision)))

    program = jax.jit(partial(sums_and_gradients, loss), compiler_options=QUICK)
    found = report(jax.device_get(program(weights, draw(1, (8, 32)))[0]))
    errors = [statistics.error for statistics in found.values()]
    assert errors
    assert all(0.01 < error < 0.9 for error in errors)


def test_a_config_is_written_with_the_names_of_its_formats():
    precision = coat.Precision(forward="E3M4", backward="E5M2:none")
    config = dataclasses.replace(SMALL, precision=precision)
    written = resume_rules.to_json(config)
    assert written["precision"]["forward"] == "E3M4"
    assert from_json(Config, written, "config").precision == precision


def test_kernels_are_for_fp8_only():
    with pytest.raises(UserError, match=r"E4M3 and E5M2.*forward=E3M4, backward=E5M2.*XLA"):
        ops.linear(
            jnp.ones((2, 4)),
            jnp.ones((4, 4)),
            precision=coat.Precision(forward="E3M4"),
            implementation="triton",
        )
