"""What the backward pass keeps, to the byte: the table in `precision`, and nothing twice.

`jax.vjp` returns a function that is a tree of the arrays it needs. Weights are there by
reference; the rest is counted. Elements take, and rows of a norm have

    2 bytes in BF16,  1 + 1/16 in FP8 blocks of 16          4 bytes of statistics each

Scalars are not counted: FP8 operands may keep their scales, and no more.
"""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from ops_cases import (
    FFN,
    HEAD_DIM,
    HEADS,
    PRESETS,
    WIDTH,
    draw,
    layer,
    layer_params,
    some_norm,
    weight,
)

import coat_jax as coat
from coat_jax import ops

B, S = 2, 32
ROWS = B * S
PRESETS = PRESETS | {
    "large blocks": dataclasses.replace(coat.COAT_LEAN, block=32, attention_block=128),
}
presets = pytest.mark.parametrize("name", PRESETS)


def kept_bytes(f, x, *weights):
    """The bytes that f's backward pass needs besides the weights, each of which it needs once."""
    pull = jax.eval_shape(lambda x, *weights: jax.vjp(f, x, *weights)[1], x, *weights)
    kept = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(pull)]
    for leaf in jax.tree.leaves(weights):
        kept.remove((leaf.shape, leaf.dtype))
    matrices = sum(leaf.ndim == 2 for leaf in jax.tree.leaves(weights))
    scalars = [entry for entry in kept if entry[0] == ()]
    assert len(scalars) <= 2 * matrices, "more than a scale for each input and each weight"
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in kept if shape)


def elements(rows, width, block):
    """Bytes of rows * width numbers: FP8 and one exponent per block, or BF16."""
    return rows * (2 * width if block is None else width + -(-width // block))


def activations(*shape):
    return draw(1, shape, dtype=jnp.bfloat16)


@presets
def test_a_layer_saves_what_the_table_says(name):
    precision = PRESETS[name]
    block, attention_block = precision.block, precision.attention_block

    def f(x, params):
        return layer(params, x, precision)

    statistics = 4 * ROWS
    norm_qkv = elements(ROWS, WIDTH, block) + statistics
    heads = 2 * HEADS + 2 * (HEADS // 2)  # of q and o, k and v
    attention = elements(ROWS * heads, HEAD_DIM, attention_block)
    mlp = elements(ROWS, WIDTH, block) + statistics + 2 * elements(ROWS, FFN, block)
    positions = 4 * S  # once for q and k
    want = norm_qkv + attention + mlp + positions
    assert kept_bytes(f, activations(B, S, WIDTH), layer_params()) == want


@presets
def test_a_linear_layer_saves_its_input_once_for_all_weights(name):
    want = ROWS * WIDTH * (2 if name == "bf16" else 1)
    ws = tuple(weight(i, WIDTH, 10 + i) for i in range(3))
    linear = partial(ops.linear, precision=PRESETS[name])
    assert kept_bytes(linear, activations(B, S, WIDTH), ws) == want


@presets
def test_a_norm_saves_its_input_and_one_or_two_numbers_per_row(name):
    for kind, numbers in (("rms", 1), ("layer", 2)):
        norm = some_norm(kind, 40)
        got = kept_bytes(partial(ops.norm, precision=PRESETS[name]), activations(B, S, 40), norm)
        # LayerNorm's shift adds: its gradient needs no shift, but its dtype, so that it stays.
        assert got == elements(ROWS, 40, PRESETS[name].block) + 4 * numbers * ROWS


@presets
def test_an_mlp_saves_its_input_and_the_inputs_of_its_activation(name):
    """A short last block has an exponent too: 172 is 10 blocks of 16 and one of 12."""
    block, norm = PRESETS[name].block, some_norm("rms", WIDTH)
    for width in (172, 176):
        weights = weight(2, WIDTH, width), weight(3, width, WIDTH), draw(4, (width,))
        mlp = partial(ops.mlp, precision=PRESETS[name])
        got = kept_bytes(mlp, activations(B, S, WIDTH), norm, *weights)
        assert got == elements(ROWS, WIDTH, block) + 4 * ROWS + elements(ROWS, width, block)


def test_cross_entropy_saves_the_hidden_states_and_one_number_per_token():
    """Besides the labels."""
    labels = jnp.zeros((B, S), jnp.int32)

    def f(hidden, w):
        return ops.cross_entropy(hidden, w, labels, chunk=8)

    got = kept_bytes(f, activations(B, S, WIDTH), weight(1, WIDTH, 1000))
    assert got == 2 * ROWS * WIDTH + 4 * ROWS + 4 * ROWS
