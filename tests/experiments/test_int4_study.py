"""The study of INT4: laws of what it adds to coat_jax, its statistics, and one run of it."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from coat_jax import models, ops
from coat_jax.models import Llama
from coat_jax.nn.modular import Dense
from coat_jax.numerics.cache_formats import decode_heads, encode_heads
from coat_jax.ops.rotary import join_heads
from coat_jax.quantization.calibration import observe
from coat_jax.quantization.projections import replace_projections, unstack
from experiments.int4_study import caches, fireq, increases, quantizing
from experiments.int4_study.caches import RoundedAttention, round_caches
from experiments.int4_study.study import STUDY
from experiments.int4_study.ways import REFERENCE, RIVALS, WAYS, Way
from experiments.loss_study import arms
from experiments.row_files import Row

CONFIG = models.Config(
    vocab=64, width=128, layers=1, heads=2, kv_heads=1, head_dim=32, ffn=128, context=32,
    scan=False, precision="bf16", dtype=jnp.float32,
)  # fmt: skip
TOKENS = [np.arange(64).reshape(2, 32) * 5 % 64, np.arange(64).reshape(2, 32) * 11 % 64]


@pytest.fixture(scope="module")
def model() -> Llama:
    return Llama(CONFIG, rngs=nnx.Rngs(0))


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def e4m3(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)


# --- FireQ -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "power"), [(0.1, 1), (2.0**-12, 32)])
def test_fireqs_weights_are_products_rounded_to_e4m3(size: float, power: int):
    """p is the smallest power of two with which no scale is below E4M3's smallest number."""
    weight = size * normal(256, 4)
    found = fireq.quantize_weight(weight)
    np.testing.assert_array_equal(found.scale, np.float32(1 / power))
    groups = weight.T.reshape(4, 2, 128) * power
    s = np.abs(groups).max(-1, keepdims=True) / np.float32(7)
    assert s.min() >= 2.0**-9
    assert power == 1 or s.min() < 2.0**-8
    s = e4m3(s)
    codes = np.clip(np.round(groups / s), -8, 7)
    np.testing.assert_array_equal(found.codes.astype(np.float32), e4m3(codes * s).reshape(4, 256))


def test_fireqs_power_leaves_room_for_the_largest_weight():
    weight = normal(256, 4) * 2.0**-12
    weight[0, 0] = 100
    found = fireq.quantize_weight(weight)
    assert found.scale[0] == 1 / 4
    np.testing.assert_allclose(found.codes[0, 0].astype(np.float32) / 4, 100, rtol=2**-3)


def test_fireqs_cache_maps_the_largest_number_to_7():
    x = normal(3, 5, 32)
    x[0, 0] = 0
    found = np.asarray(fireq.round_heads(jnp.asarray(x)))
    scale = np.abs(x).max(-1, keepdims=True) / 7
    assert (np.abs(found - x) <= scale * 0.5001).all()
    np.testing.assert_allclose(np.abs(found).max(-1), np.abs(x).max(-1), rtol=1e-6)
    np.testing.assert_array_equal(found[0, 0], 0)


def test_folded_keys_have_equally_large_pairs_and_the_model_stays_the_same(model):
    folded = fireq.fold_keys(model, TOKENS)
    (pairs,) = observe(folded, TOKENS).pairs
    np.testing.assert_allclose(pairs, np.median(pairs), rtol=1e-5)
    (before,) = observe(model, TOKENS).pairs
    assert before.max() > 1.2 * before.min()
    logits = nnx.jit(lambda model: model(TOKENS[0]))
    np.testing.assert_allclose(logits(folded), logits(model), rtol=1e-4, atol=1e-4)


# --- Caches ----------------------------------------------------------------------------------


def modular(model: Llama) -> Llama:
    return replace_projections(unstack(model), lambda path, *params: Dense(*params))


def rounded(model: Llama, cache: caches.Cache) -> RoundedAttention:
    plain = modular(model)
    round_caches(plain, cache)
    return plain.layers[0].attention


@pytest.mark.parametrize("cache", ["int8", "int4", "fireq"])
def test_attention_to_rounded_keys_is_attention_to_decoded_heads(model, cache):
    x = jnp.asarray(normal(2, 8, CONFIG.width))
    exact = modular(model).layers[0].attention
    _, q, k, v = exact._heads(x, None)
    decode = fireq.round_heads
    if cache != "fireq":
        decode = lambda heads: decode_heads(encode_heads(heads, cache), heads.dtype)  # noqa: E731
    o = ops.attention(q, decode(k), decode(v), causal=True, precision="bf16")
    expected = x + exact._project_out(join_heads(o))
    np.testing.assert_allclose(rounded(model, cache)(x), expected, rtol=1e-5, atol=1e-5)
    assert np.abs(exact(x) - expected).max() > 1e-4


@pytest.mark.parametrize("cache", ["int8", "int4"])
def test_attention_to_rounded_keys_is_what_generation_computes(model, cache):
    """For a token that is added to a text."""
    attention, x = rounded(model, cache), jnp.asarray(normal(2, 8, CONFIG.width))
    _, past = attention.prefill(x, cache=cache)
    past = jax.tree.map(lambda array: array[None], past)
    positions, first = jnp.full((2, 1), 7), jnp.zeros(2, jnp.int32)
    last, _ = attention.decode(x[:, 7:], positions, ops.Visible(past, 0, first, 7))
    np.testing.assert_allclose(last, attention(x)[:, 7:], rtol=1e-4, atol=1e-4)


# --- Statistics ------------------------------------------------------------------------------

# Of each seed, in nats.
INCREASES = {
    "bf16": {"W4A8": (0.02, 0.03, 0.025), "FireQ W4A8": (0.04, 0.06, 0.05)},
    "coat": {"W4A8": (0.01, 0.018, 0.014), "FireQ W4A8": (0.03, 0.04, 0.05)},
}


@pytest.fixture
def rows(call_of) -> list[Row]:
    call = call_of(STUDY, "--size", "tiny")

    def row(arm: str, seed: int) -> Row:
        (named,) = STUDY.rows_of(call, arm, [seed], "a text")
        of_ways = dict.fromkeys(WAYS, 0.001) | {w: v[seed] for w, v in INCREASES[arm].items()}
        of_ways[REFERENCE] = 0
        loss = 2 + 0.1 * seed
        return named | {
            "quantized": {way: [loss + i - 0.5, loss + i + 0.5] for way, i in of_ways.items()}
        }

    return [row(arm, seed) for arm in INCREASES for seed in range(3)]


def test_ratios_are_geometric_means_over_seeds(rows):
    found = increases.ratio(increases.by_arm(rows)["bf16"], "W4A8", "FireQ W4A8")
    assert found == pytest.approx((0.5, 0.5, 0.5))
    found = increases.ratio(increases.by_arm(rows)["coat"], "W4A8", "FireQ W4A8")
    assert found.mean == pytest.approx((0.01 * 0.018 * 0.014 / (0.03 * 0.04 * 0.05)) ** (1 / 3))
    assert found.low < found.mean < found.high
    assert all(map(math.isnan, increases.ratio(rows, REFERENCE, "W4A8")))


def test_an_excess_is_paired_with_the_baseline_of_its_seed(rows):
    from scipy import stats  # here, because it takes each worker a second

    own, base = (INCREASES[arm]["W4A8"] for arm in ("coat", "bf16"))
    found = increases.excesses(rows)
    effect = found["coat", "W4A8"]
    assert effect.mean == pytest.approx(np.mean(np.subtract(own, base)))
    assert effect.p == pytest.approx(stats.ttest_rel(own, base).pvalue)
    assert effect.holm > effect.p
    assert len(found) == len(WAYS) - 1


def test_tables_are_in_nats_also_for_one_seed_alone(rows, capsys):
    STUDY.show(rows, None)
    printed = capsys.readouterr().out
    for words in ("+0.02500 ± 0.01242", "W4A8 / FireQ W4A8", "0.50 (0.50 .. 0.50)"):
        assert words in printed
    STUDY.show(rows[:1], None)
    printed = capsys.readouterr().out
    assert "+0.02000 ± ?" in printed
    assert "0.50 (?)" in printed
    assert "Holm" not in printed


def test_ways_are_compared_with_ways_that_there_are():
    assert {*RIVALS, *RIVALS.values(), REFERENCE} <= WAYS.keys()
    assert WAYS[REFERENCE] == Way()


# --- A run -----------------------------------------------------------------------------------


@pytest.mark.costly
def test_a_run_measures_every_way(small, job_of, monkeypatch: pytest.MonkeyPatch):
    model = dataclasses.replace(small.model, width=128, heads=4, kv_heads=4, ffn=128)
    monkeypatch.setitem(arms.SIZES, "small", dataclasses.replace(small, model=model))
    monkeypatch.setattr(quantizing, "CALIBRATION", 4)
    (row,) = quantizing.measure(job_of(STUDY, "coat"))
    assert [*row["quantized"]] == [*WAYS]
    losses = {way: np.mean(found) for way, found in row["quantized"].items()}
    exact = losses.pop(REFERENCE)
    for way, loss in losses.items():
        assert loss != exact, way
        assert loss == pytest.approx(exact, rel=0.02), way
    assert abs(losses["W8A8 INT8"] - exact) < 2e-3
