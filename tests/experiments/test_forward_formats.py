"""Operands of forward products that are rounded to other formats, and what that costs."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_model import filled

from coat_jax import quantization
from coat_jax.kernels import gemm
from coat_jax.quantization import Recipe
from experiments import forward_formats
from experiments.forward_formats import APART, COLUMNS, FORMATS, MODEL, rounding, with_outliers

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(2, 3, 8)).astype(np.float32)
W = RANDOM.normal(size=(8, 5)).astype(np.float32)


def product() -> np.ndarray:
    @jax.jit
    def of_operands(*sides):
        return gemm.product(*(gemm.Operand(side, None, None) for side in sides), jnp.float32)

    return np.asarray(of_operands(X, W))


def in_int8(x: np.ndarray, axis: int | None) -> np.ndarray:
    scale = np.max(np.abs(x), axis=axis, keepdims=True) / 127
    return np.round(x / scale) * scale


@pytest.mark.parametrize(
    ("name", "of_tokens", "of_columns"),
    [("INT8, one scale", None, None), ("INT8, a scale for each row", -1, 0)],
)
def test_operands_are_rounded_as_the_format_says(name, of_tokens, of_columns):
    exact = product()
    with rounding(FORMATS[name].quantizer):
        found = product()
    np.testing.assert_allclose(found, in_int8(X, of_tokens) @ in_int8(W, of_columns), atol=1e-5)
    assert np.max(np.abs(found - exact)) > 1e-3
    np.testing.assert_array_equal(product(), exact)


def test_outliers_are_in_all_inputs_and_balancing_takes_them_out():
    """The model computes the same with them; in INT8 it is as good as without, when balanced."""
    config = dataclasses.replace(MODEL, layers=1, context=16)
    graph, params = nnx.split(filled(config))
    tokens = RANDOM.integers(0, config.vocab, (2, 4, config.context))
    planted = jax.jit(with_outliers, static_argnums=1)(params, 100)
    balanced = quantization.balance(nnx.merge(graph, planted), tokens)

    @functools.cache
    def program(way):
        forward = jax.jit(lambda params: nnx.merge(graph, params)(tokens[0]))
        if way is None:
            return forward.lower(params).compile()
        with rounding(FORMATS[way].quantizer):
            return forward.lower(params).compile()

    def logits(params, way=None):
        return np.asarray(program(way)(params))

    exact = logits(params)
    np.testing.assert_allclose(logits(planted), exact, rtol=1e-3, atol=1e-4)
    ranges = quantization.calibrate(nnx.merge(graph, planted), tokens[:1], Recipe())
    for inputs in ranges.values():
        assert inputs.columns[::APART].min() > 10 * np.median(inputs.columns)

    def error(params, way):
        return np.linalg.norm(logits(params, way) - exact)

    without = error(params, "INT8, a scale for each row")
    assert error(planted, "INT8, a scale for each row") > 5 * without
    assert error(planted, "E4M3, one scale") < 2 * error(params, "E4M3, one scale")
    assert error(nnx.state(balanced), "INT8, a scale for each row, balanced") < 1.2 * without


def test_costs_are_relative_and_have_an_interval_over_seeds():
    of_seeds = [
        {"exact": 2.0}
        | {name: dict.fromkeys(COLUMNS.values(), 2.0 * math.exp(gap)) for name in FORMATS}
        for gap in (0.001, 0.003)
    ]
    rows = forward_formats.outlier_table({"seeds": of_seeds})
    assert [len(row) for row in rows] == [1 + len(COLUMNS)] * (1 + len(FORMATS))
    assert rows[1][1] == "+0.200 % ± 1.271"  # Student's quantile of 12.7, times 0.1 %
    assert forward_formats.outlier_table({"seeds": of_seeds[:1]})[1][1] == "+0.100 % ± ?"
