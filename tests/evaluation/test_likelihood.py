"""Log probabilities are those of the logits, whatever shares a batch, on any mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from model_cases import automatic_mesh
from small_model import SMALL, filled

from coat_jax import nn
from coat_jax.errors import UserError
from coat_jax.evaluation import Passage, log_probabilities
from coat_jax.quantization import Recipe, quantize

CONFIG = dataclasses.replace(SMALL, layers=1, context=150, dtype=jnp.float32)
MODEL = filled(CONFIG)
LENGTHS = (2, 151, 17, 3, 16, 90, 33)  # the second one fills the context, with a token after it
SHORT = (2, 17, 33, 3, 16, 30, 25)  # which take two programs, not four
ROUNDING = 1e-4  # of sums of a few hundred products of order 1 in FP32, ten deep


def passages(lengths=LENGTHS):
    rng = np.random.default_rng(0)
    return [Passage(rng.integers(0, 256, n).tolist(), int(rng.integers(1, n))) for n in lengths]


def by_hand(model):
    """Of a passage, from its logits alone: no token sees those that fill the context after it."""

    @jax.jit
    def log_softmax(tokens):
        return jax.nn.log_softmax(model(tokens[None])[0])

    def of(passage):
        tokens = np.array(passage.tokens)
        filled_up = np.pad(tokens[:-1], (0, CONFIG.context + 1 - len(tokens)), constant_values=255)
        found = np.asarray(log_softmax(filled_up))
        return found[np.arange(len(tokens) - 1), tokens[1:]][passage.first - 1 :]

    return of


def assert_close(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=ROUNDING)


@pytest.mark.parametrize("batch", [8, 3])
def test_they_are_those_of_the_logits(batch):
    found = log_probabilities(MODEL, passages(), batch=batch)
    assert [len(row) for row in found] == [len(p.tokens) - p.first for p in passages()]
    assert_close(found, map(by_hand(MODEL), passages()))


def test_in_fp8_what_shares_a_batch_changes_little():
    """Scales are those of a batch, powers of two: only the smallest numbers may change."""
    model = filled(dataclasses.replace(CONFIG, precision="coat"))
    one, all_ = (log_probabilities(model, passages(SHORT), batch=batch) for batch in (1, 7))
    exact = log_probabilities(MODEL, passages(SHORT))
    differences = np.abs(np.concatenate(one) - np.concatenate(all_))
    errors = np.abs(np.concatenate(one) - np.concatenate(exact))
    assert errors.mean() > 0
    assert differences.mean() < 0.2 * errors.mean()


def test_a_quantized_model_is_scored_like_any_other():
    model = quantize(MODEL, Recipe(format="fp8"))
    found = log_probabilities(model, passages(SHORT))
    assert_close(found, map(by_hand(model), passages(SHORT)))


def test_several_devices_share_a_batch():
    config = dataclasses.replace(CONFIG, axes=nn.MeshAxes(fsdp="fsdp"), batch_axes=("fsdp",))
    mesh = automatic_mesh(4, names=("fsdp",))
    with jax.set_mesh(mesh):
        shared = log_probabilities(filled(config, mesh=mesh), passages(), batch=6)
    assert_close(shared, log_probabilities(MODEL, passages()))


def test_progress_is_reported():
    told = []
    log_probabilities(MODEL, passages((5, 6, 7)), batch=2, progress=lambda *now: told.append(now))
    assert told == [(2, 3), (3, 3)]
    assert log_probabilities(MODEL, []) == []


@pytest.mark.parametrize(
    ("passage", "batch", "message"),
    [
        (Passage([1]), 8, "Passage 0 has 1 tokens"),
        (Passage([1, 2], 2), 8, "those from 2 on are scored"),
        (Passage([1, 2], 0), 8, "those from 0 on are scored"),
        (Passage([1] * 152), 8, "152 tokens, .* context=150 allows 151"),
        (Passage([1, 256]), 8, "token 256, outside the model's vocabulary of 256"),
        (Passage([-1, 2]), 8, "token -1, outside"),
        (Passage([1, 2]), 0, "batch=0 must be a whole number from 1"),
    ],
)
def test_passages_that_cannot_be_scored_are_refused(passage, batch, message):
    with pytest.raises(UserError, match=message):
        log_probabilities(MODEL, [passage], batch=batch)


@pytest.mark.parametrize("lost", [jnp.nan, jnp.inf])
def test_a_damaged_model_is_named_as_such(lost):
    """Beside an infinite logit, the log probability of a token would be minus infinity."""
    damaged = nnx.clone(MODEL)
    damaged.head[...] = damaged.head[...].at[0, 7].set(lost)
    with pytest.raises(UserError, match="parameters are damaged, or diverged"):
        log_probabilities(damaged, passages((5,)))
