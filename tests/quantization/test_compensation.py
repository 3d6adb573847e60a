"""Laws of INT4 codes that compensate for each other's errors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from quantization_cases import TOKENS
from small_model import SMALL, filled

from coat_jax import ops
from coat_jax import quantization as q
from coat_jax.errors import UserError
from coat_jax.numerics import four_bits
from coat_jax.quantization.compensation import DAMPING, inverse_factor, quantize_weight

CONFIG = dataclasses.replace(
    SMALL, dtype=jnp.float32, width=128, heads=8, ffn=256, layers=1, scan=False
)
INT4 = q.Recipe(format="int4")


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def correlated(columns):
    """Inputs that mostly lie in 16 directions."""
    return normal(512, 16) @ normal(16, columns, seed=1) + 0.3 * normal(512, columns, seed=2)


def values_of(found):
    return np.asarray(four_bits.values(found.codes, found.scale)).T


def test_the_factor_is_that_of_the_inverse():
    products = correlated(128).T @ correlated(128)
    u = np.asarray(inverse_factor(products))
    damped = products + DAMPING * np.trace(products) / 128 * np.eye(128)
    damped /= np.diag(products).max()
    np.testing.assert_array_equal(u, np.triu(u))
    np.testing.assert_allclose(u.T @ u @ damped, np.eye(128), atol=1e-3)


def test_errors_are_subtracted_from_all_later_inputs():
    """As if the inputs were rounded one by one, also across groups."""
    weight, products = normal(256, 5, seed=3), correlated(256).T @ correlated(256)
    u = np.asarray(inverse_factor(products), np.float64)
    scale = np.asarray(four_bits.group_scales(jnp.asarray(weight.T)), np.float64)
    w = weight.astype(np.float64)
    for k in range(256):
        s = scale[:, k // 128]
        error = w[k] - np.clip(np.rint(w[k] / s), -8, 7) * s
        w -= np.outer(u[k], error / u[k, k])
    assert (np.abs(values_of(quantize_weight(weight, products)) - w) < 1e-3).mean() > 0.99


@pytest.mark.parametrize("columns", [128, 384])
def test_products_have_less_error(columns):
    x, weight = correlated(columns), normal(columns, 8, seed=3)
    plain, found = ops.quantize_weight(weight, "int4"), quantize_weight(weight, x.T @ x)
    np.testing.assert_array_equal(found.scale, plain.scale)
    error, without = (np.linalg.norm(x @ (values_of(w) - weight)) for w in (found, plain))
    assert error < 0.6 * without


def test_nothing_is_compensated_where_columns_are_independent():
    weight = normal(128, 8)
    found = quantize_weight(weight, np.eye(128, dtype=np.float32))
    np.testing.assert_array_equal(found.codes, ops.quantize_weight(weight, "int4").codes)


@pytest.mark.parametrize("size", [1e-30, 0.0])
def test_without_inputs_nothing_is_compensated(size):
    """Their squares are below FP32's smallest number."""
    weight = normal(128, 8)
    found = quantize_weight(weight, np.full((128, 128), np.float32(size) ** 2))
    np.testing.assert_array_equal(found.codes, ops.quantize_weight(weight, "int4").codes)


def test_only_the_proportions_of_products_matter():
    """Powers of two, of which FP32 loses no digit; and the types of numbers do not."""
    weight, products = normal(256, 8), correlated(256).T @ correlated(256)
    wanted = quantize_weight(weight, products).codes
    for size in (2.0**-100, 2.0**100):
        np.testing.assert_array_equal(quantize_weight(weight, products * size).codes, wanted)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(quantize_weight(weight, products).codes, wanted)


def test_products_are_summed_over_all_tokens():
    """Once for the projections of one input, and not for other formats."""
    model = filled(CONFIG)
    recipe = dataclasses.replace(INT4, leave=("*.query",))
    found = q.calibrate(model, TOKENS, recipe)
    for inputs in found.values():
        assert np.trace(inputs.products) == pytest.approx(inputs.squares, rel=1e-5)
    key, value = (found[f"layers.0.attention.{name}"].products for name in ("key", "value"))
    assert key is value
    in_8_bits = q.calibrate(model, TOKENS, q.Recipe(activations="static"))
    assert all(inputs.products is None for inputs in in_8_bits.values())


@pytest.mark.parametrize("activations", ["none", "dynamic"])
def test_a_model_loses_less(activations):
    model, recipe = filled(CONFIG), dataclasses.replace(INT4, activations=activations)
    logits = nnx.jit(lambda model: model(TOKENS[0]))
    exact = logits(model)
    error, without = (
        float(jnp.linalg.norm(logits(q.quantize(model, recipe, ranges)) - exact))
        for ranges in (q.calibrate(model, TOKENS, recipe), None)
    )
    assert error < 0.9 * without


def test_static_activations_have_the_same_codes():
    model, static = filled(CONFIG), dataclasses.replace(INT4, activations="static")
    ranges = q.calibrate(model, TOKENS, static)
    ours, theirs = (q.quantize(model, r, ranges).layers[0].mlp.down for r in (static, INT4))
    np.testing.assert_array_equal(ours.codes[...], theirs.codes[...])
    assert ours.input_scale is not None


def test_ranges_of_another_model_or_recipe_are_refused():
    model, wider = filled(CONFIG), filled(dataclasses.replace(CONFIG, width=256))
    with pytest.raises(UserError, match="an input with 128 columns, and its weight has 256"):
        q.quantize(wider, INT4, q.calibrate(model, TOKENS, INT4))
    others = q.Recipe(activations="static"), dataclasses.replace(INT4, leave=("*.down",))
    for recipe, path in zip(others, ("attention.query", "mlp.down"), strict=True):
        with pytest.raises(UserError, match=f"there are none of layers.0.{path}, or too few: "):
            q.quantize(model, INT4, q.calibrate(model, TOKENS, recipe))


def test_inputs_that_fill_no_groups_are_refused_before_the_text_is_read():
    uneven = filled(dataclasses.replace(CONFIG, ffn=192))
    with pytest.raises(UserError, match=r"'\*.down' \(192\)"):
        q.calibrate(uneven, iter(()), INT4)
    q.calibrate(uneven, TOKENS, dataclasses.replace(INT4, leave=("*.down",)))


def test_inputs_whose_products_exceed_fp32_are_refused():
    model = filled(CONFIG)
    model.layers[0].mlp.up[...] *= 1e22
    with pytest.raises(UserError, match="down are not finite"):
        q.calibrate(model, TOKENS[:1], INT4)
