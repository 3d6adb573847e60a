"""Laws of calibration."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quantization_cases import TOKENS
from small_model import SMALL, filled

from coat_jax import quantization as q
from coat_jax.errors import UserError
from coat_jax.numerics.eight_bits import LARGEST
from coat_jax.numerics.quantizer import Quantizer, sqnr_bits
from coat_jax.quantization.calibration import input_noise, input_scale, statistics, to_host

CONFIG = dataclasses.replace(SMALL, dtype=jnp.float32, scan=False)
STATIC = q.Recipe(activations="static")


def inputs_of(x):
    return to_host(jax.jit(statistics)(x))


def samples(kind, shape=(500, 400)):
    rng = np.random.default_rng(1)
    drawn = 0.3 * rng.standard_normal(shape) if kind == "normal" else rng.standard_t(4, shape)
    return jnp.asarray(drawn, jnp.float32)


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["normal", "student"])
def test_a_histogram_gives_the_quantizers_ranges(kind):
    """To the width of a bin, 1/32; the largest element is exact."""
    x = samples(kind)
    inputs = inputs_of(x)
    for format, name in (("int8", "INT8"), ("fp8", "E4M3")):
        for fit in ("max", "percentile", "mse"):
            recipe = dataclasses.replace(STATIC, activation_fit=fit)
            expected = float(jax.jit(Quantizer(name, fit=fit).limit_of)(x)[0])
            got = input_scale(inputs, format, recipe) * LARGEST[format]
            if fit == "mse":
                # Near its minimum the error is flat: that is compared, not where it is.
                assert error(x, name, got) < 1.02 * error(x, name, expected)
            else:
                assert got == pytest.approx(expected, rel=1e-6 if fit == "max" else 1 / 32)


def error(x, name, high):
    rounded = jax.jit(Quantizer(name).quantize)(x, jnp.array([high]))
    return float(jnp.sum(jnp.square(rounded - x)))


@pytest.mark.parametrize("kind", ["normal", "student"])
@pytest.mark.parametrize("activations", ["static", "dynamic"])
def test_the_noise_of_rounding_is_that_of_the_values(kind, activations):
    x = samples(kind)
    recipe = q.Recipe(activations=activations, activation_fit="max")
    for format, name in (("int8", "INT8"), ("fp8", "E4M3")):
        if activations == "static":
            quantizer = Quantizer(name)
        else:
            quantizer = Quantizer(name, over="channel", axis=0)
        expected = float(jax.jit(lambda x, rounded=quantizer: sqnr_bits(x, rounded(x)))(x))
        for size in (2.0**-100, 1.0, 2.0**70):  # whose squares are outside of FP32's range
            bits = -0.5 * np.log2(input_noise(inputs_of(size * x), format, recipe))
            assert bits == pytest.approx(expected, abs=0.03)
    assert input_noise(inputs_of(x), "int8", q.Recipe(activations="none")) == 0


def test_batches_add_up():
    """Two batches are one of both; what is in a range does not depend on the order."""
    model = filled(CONFIG)
    together = q.calibrate(model, [TOKENS.reshape(4, 16)], STATIC)
    apart = q.calibrate(model, iter(TOKENS), STATIC)
    assert together.keys() == apart.keys()
    assert len(apart) == 7 * CONFIG.layers
    for path, one in together.items():
        two = apart[path]
        assert one.counts.sum() == two.counts.sum()
        # Sums in another order may put a few elements into the next bin.
        assert np.abs(one.counts - two.counts).sum() <= 1e-3 * one.counts.sum() + 2
        assert one.largest == pytest.approx(two.largest, rel=1e-5)
        assert one.squares == pytest.approx(two.squares, rel=1e-5)


def test_it_sees_what_the_layers_get_but_for_those_that_are_left():
    """The first layer's queries and keys: the normalized embedding."""
    model = filled(CONFIG)
    recipe = dataclasses.replace(STATIC, leave=("*.down", "*.value"))
    found = q.calibrate(model, TOKENS[:1], recipe)
    assert not any(path.endswith(("down", "value")) for path in found)
    assert len(found) == 5 * CONFIG.layers
    n = model.layers[0].attention.norm(model.embed_tokens(jnp.asarray(TOKENS[0])))
    for name in ("query", "key"):
        inputs = found[f"layers.0.attention.{name}"]
        assert inputs.largest == pytest.approx(float(abs(n).max()), rel=1e-6)
        assert inputs.squares == pytest.approx(float((n**2).sum()), rel=1e-5)
        assert inputs.counts.sum() == n.size


@pytest.mark.parametrize(
    ("batches", "named"),
    [
        ([], "calibration text is empty"),
        ([np.zeros((2, 0), np.int32)], "calibration text is empty"),
        ([np.full((1, 4), SMALL.vocab)], "token 256, outside"),
        ([np.full((1, 4), 1 << 40)], "token 1099511627776, outside"),
        ([np.zeros((1, SMALL.context + 1), np.int32)], "65 tokens is longer than context=64"),
        ([np.zeros(4, np.int32)], r"\[batch, sequence\]"),
    ],
)
def test_texts_that_are_no_use(batches, named):
    with pytest.raises(ValueError, match=named):
        q.calibrate(filled(CONFIG), batches, STATIC)


def test_a_static_scale_is_never_so_small_that_it_counts_as_zero():
    inputs = inputs_of(1e-37 * jnp.ones((4, 8)))
    for format in LARGEST:
        assert input_scale(inputs, format, STATIC) >= float(jnp.finfo(jnp.float32).tiny)


def test_a_range_that_is_empty_or_not_finite_is_named():
    dead = filled(CONFIG)
    dead.layers[1].mlp.up[...] = jnp.zeros_like(dead.layers[1].mlp.up[...])
    with pytest.raises(UserError, match=r"layers.1.mlp.down are all zero"):
        q.calibrate(dead, TOKENS, STATIC)
    q.calibrate(dead, TOKENS, q.Recipe(format="int8"))  # which needs no ranges
    lost = filled(CONFIG)
    lost.layers[0].mlp.up[...] = lost.layers[0].mlp.up[...].at[0, 0].set(jnp.inf)
    with pytest.raises(UserError, match=r"layers.0.mlp.down are not finite"):
        q.calibrate(lost, TOKENS, STATIC)
