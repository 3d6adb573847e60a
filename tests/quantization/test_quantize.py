"""Laws of quantized models in memory."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from quantization_cases import TOKENS, quantized
from small_model import FAMILIES, SMALL, filled

from coat_jax import nn
from coat_jax import quantization as q
from coat_jax.errors import UserError
from coat_jax.nn.modular import Dense
from coat_jax.ops.quantized import ACTIVATION_MODES
from coat_jax.quantization.projections import paths_of, replace_projections, unstack


def model_of(family="llama", **changes):
    both = {"dtype": jnp.float32, "precision": "bf16"}
    return filled(dataclasses.replace(SMALL, **{**both, **FAMILIES[family], **changes}))


def distance(y, exact):
    return float(jnp.linalg.norm(y - exact) / jnp.linalg.norm(exact))


def projection(model, path):
    _, layer, part, name = path.split(".")
    return getattr(getattr(model.layers[int(layer)], part), name)


def of_even_weights(*outliers, size):
    """A model whose weights are evenly spread, but for outliers in the channels of some."""
    model = model_of(scan=False, layers=1)
    for path in paths_of(model.config):
        weight = projection(model, path)
        even = jax.random.uniform(jax.random.key(1), weight.shape, minval=-0.1, maxval=0.1)
        weight[...] = even.at[5].set(size) if path in outliers else even
    return model


@pytest.mark.costly
@pytest.mark.parametrize(("family", "scan"), list(zip(FAMILIES, (True, False) * 3, strict=True)))
def test_modules_compute_what_the_model_does(family, scan):
    """In every family, layers stacked or not: to the order of sums in FP32."""
    model = model_of(family, scan=scan)
    same = replace_projections(unstack(model), lambda path, kernel, bias: Dense(kernel, bias))
    tokens = jnp.asarray(TOKENS[0])
    exact = model(tokens)
    np.testing.assert_allclose(same(tokens), exact, atol=1e-4 * float(abs(exact).max()))


@pytest.mark.costly
@pytest.mark.parametrize("activations", ACTIVATION_MODES)
@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_logits_are_near_those_of_the_model(format, activations):
    """Bits that are right of INT8 and E4M3 (docs/formats.md): of normal weights 6.7 and 5.2, of
    inputs whose tails are no heavier than Student's with 6 degrees 5.2 and 5.2. Errors are
    independent, and four products lie one behind the other in each layer."""
    model = model_of()
    exact = model(jnp.asarray(TOKENS[0]))
    small = quantized(model, format=format, activations=activations)
    bits = [{"int8": 6.7, "fp8": 5.2}[format]] + [5.2] * (activations != "none")
    limit = np.sqrt(4 * SMALL.layers * sum(4.0**-b for b in bits))
    assert 0.05 * limit < distance(small(jnp.asarray(TOKENS[0])), exact) < limit


def test_every_projection_that_is_not_left_takes_a_byte_a_parameter():
    """What is not quantized is shared with the model."""
    model = model_of(scan=False)
    small = quantized(model, leave=("layers.0.*", "*.down"))
    left = set(paths_of(small.config)) - set(q.schemes_of(small))
    assert left == {p for p in paths_of(small.config) if ".0." in p or p.endswith("down")}
    assert isinstance(small.layers[1].mlp.down, Dense)
    layers = [m for _, m in nnx.iter_modules(small) if isinstance(m, nn.QuantizedLinear)]
    assert len(layers) == 6 == len(q.schemes_of(small))
    count = sum(layer.codes[...].size for layer in layers)
    scales = sum(layer.scale[...].size for layer in layers)
    assert sum(layer.nbytes for layer in layers) == count + 4 * scales
    assert small.embed[...] is model.embed[...]
    assert small.head[...] is model.head[...]


# --- Mixed formats ---------------------------------------------------------------------------


KEYS_AND_VALUES = "layers.0.attention.key", "layers.0.attention.value"
DOWN = ("layers.0.mlp.down",)


@pytest.mark.parametrize(
    ("outliers", "size", "fit", "in_fp8"),
    [
        # Weights that multiply one input have one format.
        (DOWN + KEYS_AND_VALUES, 8, {}, {*DOWN, *KEYS_AND_VALUES, "layers.0.attention.query"}),
        # With its outliers in range INT8 has few codes for the others; with them cut off, all.
        (DOWN, 2, {"fit": "max"}, {*DOWN}),
        (DOWN, 2, {"fit": "percentile", "percentile": 95}, set()),
    ],
)
def test_each_input_has_the_format_that_suits_the_ranges_of_its_weights(
    outliers, size, fit, in_fp8
):
    """INT8 for evenly spread numbers; FP8 for weights with outliers in every channel."""
    model = of_even_weights(*outliers, size=size)
    schemes = q.schemes_of(quantized(model, format="mixed", activations="none", **fit))
    assert {path for path, scheme in schemes.items() if scheme.format == "fp8"} == in_fp8


def test_inputs_decide_too_and_mixed_is_better_than_either_format():
    """One MLP has an input whose fourth channel is 20 times as large.

    Of it INT8 gets 6 bits right, and of the others next to nothing; E4M3 gets 5 bits of each.
    """
    model, tokens = model_of(scan=False, layers=1), jnp.asarray(TOKENS[0])
    norm = model.layers[0].mlp.norm.scale
    norm[...] = jnp.ones_like(norm[...]).at[3].set(20.0)
    static = {"activations": "static", "activation_fit": "max"}
    small = {name: quantized(model, format=name, **static) for name in ("int8", "fp8", "mixed")}
    schemes = q.schemes_of(small["mixed"])
    assert schemes["layers.0.mlp.gate"] == q.Scheme("fp8", "static")
    assert schemes["layers.0.mlp.up"].format == "fp8"
    of_weights = q.schemes_of(quantized(model, format="mixed", activations="none"))
    assert of_weights["layers.0.mlp.gate"].format == "int8"
    exact = model(tokens)
    of = {name: distance(found(tokens), exact) for name, found in small.items()}
    assert of["mixed"] < min(of["int8"], of["fp8"])


# --- Refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"format": "int3"}, "format='int3'"),
        ({"fit": "best"}, "fit='best'"),
        ({"activations": "some"}, "activations='some'"),
        ({"activation_fit": "best"}, "activation_fit='best'"),
        ({"percentile": 40.0}, "percentile=40.0"),
        ({"leave": ("*.gat",)}, "matches no projection"),
        ({"leave": ("*",)}, "nothing is quantized"),
    ],
)
def test_a_recipe_that_does_not_fit_is_refused(settings, named):
    with pytest.raises(UserError, match=named):
        quantized(model_of(), **settings)


def test_a_quantized_model_is_not_quantized_again():
    small = quantized(model_of(layers=1))
    for call in (lambda: q.quantize(small, q.Recipe()), lambda: q.calibrate(small, [], q.Recipe())):
        with pytest.raises(UserError, match="already quantized"):
            call()


def test_ranges_are_given_where_they_are_needed():
    model, recipe = model_of(), q.Recipe(activations="static")
    ranges = q.calibrate(model, TOKENS, recipe)
    fewer = {path: of for path, of in ranges.items() if path != "layers.1.mlp.down"}
    wider = model_of(ffn=2 * SMALL.ffn)
    for arguments, named in (
        ((model, recipe), "pass what calibrate"),
        ((model, recipe, fewer), r"there are none of layers\.1\.mlp\.down"),
        ((wider, recipe, ranges), r"ranges of layers\.0\.mlp\.down are of an input with"),
    ):
        with pytest.raises(UserError, match=named):
            q.quantize(*arguments)


@pytest.mark.parametrize("format", ["int8", "mixed"])
def test_a_weight_that_is_not_finite_is_named(format):
    model = model_of(scan=False)
    up = model.layers[1].mlp.up
    up[...] = up[...].at[0, 0].set(jnp.nan)
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up has a NaN"):
        quantized(model, format=format, activations="none")
