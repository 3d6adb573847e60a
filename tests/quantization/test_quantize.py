"""Laws of quantized models in memory."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_model import SMALL, filled

from coat_jax import generation, nn
from coat_jax import quantization as q
from coat_jax.errors import UserError
from coat_jax.nn.modular import Dense
from coat_jax.ops.quantized import ACTIVATION_MODES
from coat_jax.quantization.projections import modular, paths_of, unstacked

FAMILIES = {
    "llama": {},
    "qwen2": {"qkv_bias": True, "tied": True, "window": 9},
    "qwen3": {"qk_norm": "head"},
    "olmo": {"norm": "layer"},
    "olmo2": {"norms": "after", "qk_norm": "all"},
}
TOKENS = np.random.default_rng(0).integers(0, SMALL.vocab, (2, 3, 20))


def model_of(family="llama", **changes):
    both = {"dtype": jnp.float32, "precision": "bf16"}
    return filled(dataclasses.replace(SMALL, **{**both, **FAMILIES[family], **changes}))


def distance(y, exact):
    return float(jnp.linalg.norm(y - exact) / jnp.linalg.norm(exact))


def quantized(model, **recipe):
    recipe = q.Recipe(**recipe)
    return q.quantize(
        model, recipe, q.calibrate(model, TOKENS, recipe) if recipe.calibrated else None
    )


@pytest.mark.costly
@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_modules_compute_what_the_model_does(family, scan):
    """In every family, layers stacked or not: to the order of sums in FP32."""
    model = model_of(family, scan=scan)
    same = modular(unstacked(model), lambda path, kernel, bias: Dense(kernel, bias))
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


def test_every_projection_takes_a_byte_a_parameter():
    model = model_of()
    small = quantized(model)
    layers = [m for _, m in nnx.iter_modules(small) if isinstance(m, nn.QuantizedLinear)]
    assert len(layers) == 7 * SMALL.layers == len(q.schemes_of(small))
    count = sum(layer.codes[...].size for layer in layers)
    scales = sum(layer.scale[...].size for layer in layers)
    assert sum(layer.nbytes for layer in layers) == count + 4 * scales
    held = {leaf.size for leaf in jax.tree.leaves(nnx.state(small, nnx.Param))}
    assert max(held) == SMALL.vocab * SMALL.width  # embedding and head; of layers only norms


def test_parameters_that_are_not_quantized_are_shared_with_the_model():
    model = model_of(scan=False)
    small = quantized(model)
    assert small.embed[...] is model.embed[...]
    assert small.head[...] is model.head[...]


def test_it_generates_what_its_own_logits_say():
    small = quantized(model_of(), activations="dynamic")
    prompt = [3, 1, 4, 1, 5]
    (new,) = generation.generate(
        small, [prompt], max_tokens=6, sampling=generation.Sampling(temperature=0)
    )
    text = prompt + new
    logits = np.asarray(small(jnp.asarray([text])))[0]
    for i, token in enumerate(new, len(prompt) - 1):
        best = logits[i].max()
        assert logits[i][token] > best - 1e-3 * np.abs(logits).max()


def test_some_projections_may_be_left():
    small = quantized(model_of(), leave=("layers.0.*", "*.down"))
    left = set(paths_of(small.config)) - set(q.schemes_of(small))
    assert left == {p for p in paths_of(small.config) if ".0." in p or p.endswith("down")}
    assert isinstance(small.layers[1].mlp.down, Dense)


# --- Mixed formats ---------------------------------------------------------------------------


def test_each_input_has_the_format_that_suits_it_and_its_weights():
    """INT8 for evenly spread numbers; FP8 for weights with outliers in every channel."""
    model = model_of(scan=False)
    for path in paths_of(model.config):
        _, layer, part, name = path.split(".")
        weight = getattr(getattr(model.layers[int(layer)], part), name)
        weight[...] = jax.random.uniform(jax.random.key(1), weight.shape, minval=-0.1, maxval=0.1)
    down = model.layers[1].mlp.down
    down[...] = down[...].at[5].set(8.0)
    formats = {
        p: s.format
        for p, s in q.schemes_of(quantized(model, format="mixed", activations="none")).items()
    }
    assert formats.pop("layers.1.mlp.down") == "fp8"
    assert set(formats.values()) == {"int8"}


STATIC = {"activations": "static", "activation_fit": "max"}


def with_an_outlier():
    """A model of which one MLP has an input whose fourth channel is 20 times as large."""
    model = model_of(scan=False)
    norm = model.layers[1].mlp.norm.scale
    norm[...] = jnp.ones_like(norm[...]).at[3].set(20.0)
    return model


def test_inputs_decide_too():
    """Of the large channel INT8 gets 6 bits right, and of the others next to nothing; E4M3 gets 5
    bits of each."""
    schemes = q.schemes_of(quantized(with_an_outlier(), format="mixed", **STATIC))
    assert schemes["layers.1.mlp.gate"] == ("fp8", "static")
    assert schemes["layers.1.mlp.up"].format == "fp8"
    of_weights = q.schemes_of(quantized(with_an_outlier(), format="mixed", activations="none"))
    assert of_weights["layers.1.mlp.gate"].format == "int8"


def test_mixed_is_better_than_either_format():
    model = with_an_outlier()
    exact = model(jnp.asarray(TOKENS[0]))
    of = {
        format: distance(quantized(model, format=format, **STATIC)(jnp.asarray(TOKENS[0])), exact)
        for format in ("int8", "fp8", "mixed")
    }
    assert of["mixed"] < min(of["int8"], of["fp8"])


# --- Refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"format": "int4"}, "format='int4'"),
        ({"fit": "best"}, "fit='best'"),
        ({"activations": "some"}, "activations='some'"),
        ({"activation_fit": "best"}, "activation_fit='best'"),
        ({"percentile": 40.0}, "percentile=40.0"),
    ],
)
def test_a_recipe_with_an_unknown_setting(settings, named):
    with pytest.raises(UserError, match=named):
        q.Recipe(**settings)


@pytest.mark.parametrize(
    ("leave", "named"), [(("*.gat",), "matches no projection"), (("*",), "nothing is quantized")]
)
def test_globs_that_do_not_fit(leave, named):
    with pytest.raises(UserError, match=named):
        quantized(model_of(), leave=leave)


@pytest.mark.parametrize("recipe", ["int8", {"format": "int8"}])
def test_a_recipe_is_a_recipe(recipe):
    model = filled(SMALL)
    for call in (lambda: q.quantize(model, recipe), lambda: q.calibrate(model, [], recipe)):
        with pytest.raises(TypeError, match=r"not .*int8.*pass Recipe\(format='int8'\)"):
            call()


def test_a_quantized_model_is_not_quantized_again():
    small = quantized(model_of())
    with pytest.raises(UserError, match="already quantized"):
        q.quantize(small, q.Recipe())
    with pytest.raises(UserError, match="already quantized"):
        q.calibrate(small, TOKENS, q.Recipe(activations="static"))


def test_ranges_are_given_where_they_are_needed_and_only_there():
    model, recipe = model_of(), q.Recipe(activations="static")
    with pytest.raises(UserError, match="pass what calibrate"):
        q.quantize(model, recipe)
    ranges = q.calibrate(model, TOKENS, recipe)
    with pytest.raises(UserError, match=r"there is none of layers\.1\.mlp\.down"):
        q.quantize(model, recipe, {k: v for k, v in ranges.items() if k != "layers.1.mlp.down"})
    with pytest.raises(UserError, match="needs no ranges"):
        q.quantize(model, q.Recipe(), ranges)
    wider = model_of(ffn=2 * SMALL.ffn)
    with pytest.raises(UserError, match=r"ranges of layers\.0\.mlp\.down are of an input with"):
        q.quantize(wider, recipe, ranges)


def test_a_weight_that_is_not_finite_is_named():
    model = model_of(scan=False)
    up = model.layers[1].mlp.up
    up[...] = up[...].at[0, 0].set(jnp.nan)
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up has a NaN"):
        quantized(model)
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up has a NaN"):
        quantized(model, format="mixed", activations="none")


def test_all_weights_of_an_input_decide():
    """Those of keys and values have outliers; that of queries, with the same input, has none."""
    model = model_of(scan=False)
    attention = model.layers[1].attention
    for name in ("query", "key", "value"):
        weight = getattr(attention, name)
        weight[...] = jax.random.uniform(jax.random.key(1), weight.shape, minval=-0.1, maxval=0.1)
        if name != "query":
            weight[...] = weight[...].at[5].set(8.0)
    schemes = q.schemes_of(quantized(model, format="mixed", activations="none"))
    formats = {schemes[f"layers.1.attention.{name}"].format for name in ("query", "key", "value")}
    assert formats == {"fp8"}


def test_the_format_suits_the_ranges_that_the_recipe_fits():
    """With its outliers in range INT8 has few codes for the others; with them cut off, all."""
    model = model_of(scan=False)
    down = model.layers[1].mlp.down
    down[...] = jax.random.uniform(jax.random.key(1), down.shape, minval=-0.1, maxval=0.1)
    down[...] = down[...].at[5].set(2.0)
    for fit, wanted in (("max", "fp8"), ("percentile", "int8")):
        recipe = {"format": "mixed", "activations": "none", "fit": fit, "percentile": 95}
        assert q.schemes_of(quantized(model, **recipe))["layers.1.mlp.down"].format == wanted
