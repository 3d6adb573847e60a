"""Token by token, from a cache, a model says what it says in training."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from generation_cases import FAMILIES, LENGTHS, NEW, logits_at_once, logits_one_by_one, variant
from model_cases import automatic_mesh
from small_model import filled

from coat_jax import nn
from coat_jax.generation.cache import prefill
from coat_jax.numerics.cache_formats import StoredHeads, decode_heads, format_of_cache

SLOTS = 40


@functools.cache
def one_by_one(config):
    return logits_one_by_one(filled(config), slots=SLOTS)


@functools.cache
def at_once(config):
    return logits_at_once(filled(config))


def relative(got, wanted):
    """The largest difference of each token's logits, relative to the largest of them."""
    return np.abs(got - wanted).max(axis=-1) / np.abs(wanted).max(axis=-1)


BF16 = {"dtype": jnp.bfloat16}
STORED = BF16 | {"param_dtype": jnp.bfloat16}


@pytest.mark.costly
@pytest.mark.parametrize(
    ("family", "changes", "most", "usually"),
    [
        # In FP32, up to the order of sums: some dozen of them in a row, each off by 2^-24 or so.
        *((family, {"scan": family != "olmo2"}, 1e-5, 1e-5) for family in FAMILIES),
        # A sum in another order may fall on the other side of a rounding of 2^-9; most do not.
        *((family, STORED | {"scan": family == "olmo"}, 2**-6, 0) for family in ("qwen3", "olmo")),
        ("olmo2", STORED | {"scan": False}, 2**-6, 0),
        # In FP8, the scale of a product's input is that of fewer rows, so it may be a smaller power
        # of two. Codes that are normal under both scales are the same value; others differ by 2^-17
        # of the largest magnitude at most. Sums in another order turn a code into its neighbour now
        # and then: an eighth of one element in a sum over 64 or more. A dozen of those stay below
        # 1 / 16.
        ("llama", BF16 | {"precision": "coat"}, 1 / 16, 0),
        ("mistral", BF16 | {"precision": "coat_lean"}, 1 / 16, 0),
        ("olmo", BF16 | {"precision": "fp8_linear"}, 1 / 16, 0),
        ("olmo2", BF16 | {"precision": "coat_lean"}, 1 / 16, 0),
    ],
)
def test_logits_are_those_of_the_training_forward(family, changes, most, usually):
    config = variant(family, **changes)
    got, cache = one_by_one(config)
    assert cache.past.keys.codes.dtype == config.dtype
    off = relative(got, at_once(config))
    assert off.max() < most
    assert np.median(off) <= usually


def test_the_precision_decides_what_is_generated():
    """The logits in FP8 are not those in BF16: the bounds above are tighter than this."""
    got, _ = one_by_one(variant("olmo2", dtype=jnp.bfloat16, precision="coat_lean"))
    off = relative(got, at_once(variant("olmo2", dtype=jnp.bfloat16)))
    assert np.median(off) > 2**-6


def test_slots_before_a_text_do_not_change_its_logits():
    """Tokens in the slots before a text, and slots that are not filled, are not seen."""
    graph, state = nnx.split(filled(variant("mistral")))
    tokens = np.random.default_rng(0).integers(0, 256, (2, 20))
    tokens[1, 8:] = tokens[0, 8:]
    starts = np.array([8, 8])

    @jax.jit
    def filled_up(state, tokens, starts):
        return prefill(nnx.merge(graph, state), tokens, starts, 24)

    logits, cache = filled_up(state, tokens, starts)
    np.testing.assert_allclose(logits[0], logits[1], rtol=1e-6)
    np.testing.assert_array_equal(cache.filled - cache.starts, [12, 12])


def test_a_cache_has_one_place_per_layer_text_slot_and_key_head():
    config = variant("qwen3")
    _, cache = one_by_one(config)
    shape = (config.layers, len(LENGTHS), config.kv_heads, SLOTS, config.head_dim)
    keys, values = (stored.codes for stored in cache.past)
    assert keys.shape == values.shape == shape
    assert int(cache.filled) == max(LENGTHS) + NEW
    np.testing.assert_array_equal(np.asarray(keys)[..., int(cache.filled) :, :], 0)


@pytest.mark.parametrize("cache", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("family", ["olmo2", "qwen3"])
def test_rounded_keys_and_values_are_what_their_codes_stand_for(family, cache, monkeypatch):
    """Beside them, nothing is rounded: neither the prompt's attention nor queries."""
    model = filled(variant(family, scan=family == "qwen3"))
    got, stored = logits_one_by_one(model, cache=cache)
    assert {format_of_cache(one) for one in stored.past} == {cache}
    store = nn.Attention._store

    def round_and_store(self, k, v, _):
        return nn.Past(*(StoredHeads(decode_heads(x, k.dtype)) for x in store(self, k, v, cache)))

    monkeypatch.setattr(nn.Attention, "_store", round_and_store)
    wanted, values = logits_one_by_one(model)
    assert format_of_cache(values.past.keys) is None
    np.testing.assert_array_equal(got[:, 0], wanted[:, 0])
    assert relative(got, wanted).max() < 1e-5
    unchanged = logits_at_once(model)
    np.testing.assert_allclose(got[:, 0], unchanged[:, 0], atol=1e-5)
    assert relative(got, unchanged)[:, 1:].min() > 1e-4


@pytest.mark.parametrize("cache", ["fp8", "int4"])
def test_on_a_mesh_rounded_keys_and_values_are_the_same(cache):
    """But for those few that a sum in another order takes to the neighbouring code."""
    changes = {"axes": nn.MeshAxes("fsdp", "tensor"), "batch_axes": ("data",)}
    mesh = automatic_mesh(3, 1, 2)
    with jax.set_mesh(mesh):
        got, stored = logits_one_by_one(filled(variant(**changes), mesh=mesh), cache=cache)
    wanted, alone = logits_one_by_one(filled(variant()), cache=cache)
    for one, other in zip(jax.tree.leaves(stored.past), jax.tree.leaves(alone.past), strict=True):
        assert one.addressable_shards[0].data.size * 6 == one.size
        assert (np.asarray(one) != np.asarray(other)).mean() < 0.01
    assert np.median(relative(got, wanted)) < 1e-5


@pytest.mark.parametrize("sizes", [(3, 1, 2), (1, 2, 4)])
def test_on_a_mesh_the_logits_are_those_of_the_training_forward(sizes):
    """Tensor parallelism over 2 devices cuts the 2 key heads; over 4 it cannot."""
    config = variant("qwen3", axes=nn.MeshAxes("fsdp", "tensor"), batch_axes=("data",))
    wanted = at_once(variant("qwen3"))
    mesh = automatic_mesh(*sizes)
    with jax.set_mesh(mesh):
        got, cache = logits_one_by_one(filled(config, mesh=mesh), slots=SLOTS)
    assert relative(got, wanted).max() < 1e-5
    keys = cache.past.keys.codes
    part = keys.addressable_shards[0].data.size / keys.size
    assert part == (1 / 6 if sizes[2] == 2 else 1)
