"""Laws of attention: softmax over all scores at once, on q, k and v or on what blocks make of them.

Rounding of q, k and v is written in FP64 (ops_cases.py); the output projection is `linear`,
whose own oracle is in test_linear.py.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops_cases import (
    assert_close,
    draw,
    plain_attention,
    same_gradients,
    through,
    weight,
)

import coat_jax as coat
from coat_jax import ops
from coat_jax.numerics.cache_formats import decode_heads, encode_heads
from coat_jax.numerics.formats import E4M3

B, S, H = 2, 7, 24
SEGMENTS = jax.device_put(np.int32([[0, 0, 0, 1, 1, 1, 1], [3, 3, 2, 2, 2, 2, 9]]))
MASKS = {
    "causal": {},
    "full": {"causal": False},
    "window of 1": {"window": 1},
    "window of 3": {"window": 3},
    "window of all and more": {"window": 100},
    "segments": {"segments": SEGMENTS},
    "full segments": {"segments": SEGMENTS, "causal": False},
    "window in segments": {"segments": SEGMENTS, "window": 2},
    "scale": {"scale": 0.5},
    "scale 0": {"scale": 0.0},
}


def qkv(seed=1, heads=4, kv_heads=2, tokens=S, keys=None, head_dim=H):
    shapes = ((B, tokens, heads, head_dim), *[(B, keys or tokens, kv_heads, head_dim)] * 2)
    return draw(seed, *shapes)


def test_full_precision_is_softmax_of_the_scores():
    """Each mask, and each number of key heads and keys, on arrays of its own, in one program."""
    masks = MASKS | {"own key heads": {}, "one key head": {}, "other keys": {"causal": False}}

    def of(attend):
        return lambda arrays: {name: attend(*arrays[name], **mask) for name, mask in masks.items()}

    arrays = {name: qkv(i) for i, name in enumerate(MASKS)}
    arrays["own key heads"], arrays["one key head"] = qkv(kv_heads=4), qkv(kv_heads=1)
    arrays["other keys"] = qkv(keys=5)
    same_gradients(of(partial(ops.attention, precision="bf16")), of(plain_attention), arrays)


def test_lean_attention_computes_with_q_k_and_v_rounded_to_blocks():
    """Heads of 24: a block of 16 and a short one, or only a short one."""
    mask, blocks = MASKS["window in segments"], (16, 128)
    lean = [dataclasses.replace(coat.COAT_PAPER, attention_block=block) for block in blocks]

    def f(*args):
        return [ops.attention(*args, **mask, precision=precision) for precision in lean]

    def plain(*args):
        return [plain_attention(*(through(x, E4M3, n) for x in args), **mask) for n in blocks]

    same_gradients(f, plain, *qkv())


def test_with_an_exact_forward_pass_only_the_gradients_are_those_of_rounded_q_k_and_v():
    mask, arrays = MASKS["window in segments"], qkv()
    rounded = [through(x, E4M3, 16) for x in arrays]
    attend = partial(ops.attention, **mask, precision=LEAN)
    y, pull = jax.vjp(attend, *arrays)
    np.testing.assert_array_equal(y, ops.attention(*arrays, **mask, precision="bf16"))
    wanted = jax.vjp(partial(plain_attention, **mask), *rounded)[1](jnp.ones_like(y))
    assert_close(pull(jnp.ones_like(y)), wanted)


LEAN = dataclasses.replace(coat.COAT_LEAN, stochastic=False)
PROJECTED = {
    "bf16": coat.BF16,
    "fp8_linear": coat.FP8_LINEAR,
    "coat_lean, to nearest": LEAN,
    # In BF16, since FP8 products would round o to the same codes once more.
    "rounded forward": dataclasses.replace(LEAN, exact_forward=False, fp8_linear=False),
}


@pytest.mark.costly
@pytest.mark.parametrize("name", PROJECTED)
def test_attention_linear_is_attention_then_linear(name):
    """With blocks between them where the forward pass is not exact."""
    precision = PROJECTED[name]

    def f(q, k, v, w, b):
        return ops.attention_linear(q, k, v, w, b, window=4, precision=precision)

    def composed(q, k, v, w, b):
        o = ops.attention(q, k, v, window=4, precision=precision)
        if not precision.exact_forward:
            o = through(o, E4M3, precision.attention_block)
        return ops.linear(o.reshape(B, S, -1), w, b, precision=precision)

    same_gradients(f, composed, *qkv(), weight(2, 4 * H, 10), draw(3, (10,)))


@pytest.mark.parametrize("cache", [None, "int8", "fp8", "int4"])
def test_attention_of_the_newest_token_is_softmax_over_visible_slots_and_itself(cache):
    """Of what is stored, its own key and value as well as those of others."""
    q, *numbers = draw(1, (2, 1, 4, 16), *[(3, 2, 2, 5, 16)] * 2, *[(2, 2, 1, 16)] * 2)
    stored = [encode_heads(x, cache) for x in numbers]
    past, new = ops.Past(*stored[:2]), ops.Past(*stored[2:])
    keys, values, own_key, own_value = (decode_heads(x, jnp.float32) for x in stored)
    first, filled, visible = np.int32([0, 2]), 4, np.ones((2, 6), bool)
    visible[1, :2] = visible[:, filled:5] = False
    for scale, layer in ((None, 2), (0.5, 1)):
        k, v = (
            np.repeat(np.concatenate([of_past[layer], own], axis=2), 2, axis=1)
            for of_past, own in ((keys, own_key), (values, own_value))
        )
        scores = np.einsum("bnh,bnth->bnt", q[:, 0], k) * (scale or 16**-0.5)
        scores = np.where(visible[:, None], scores, -np.inf)
        wanted = jnp.einsum("bnt,bnth->bnh", jax.nn.softmax(scores), v)
        attend = jax.jit(partial(ops.attention_to_past, scale=scale))
        assert_close(attend(q, new, ops.Visible(past, layer, first, filled))[:, 0], wanted)


def test_past_the_last_slot_there_is_none_to_read():
    q, *numbers = draw(1, (2, 1, 4, 16), *[(1, 2, 2, 5, 16)] * 2, *[(2, 2, 1, 16)] * 2)
    stored = [encode_heads(x, None) for x in numbers]
    past, new, first = ops.Past(*stored[:2]), ops.Past(*stored[2:]), np.zeros(2, np.int32)
    both = (ops.attention_to_past(q, new, ops.Visible(past, 0, first, n)) for n in (5, 9))
    np.testing.assert_array_equal(*both)
