"""Every token of a text is scored once, after half a window; the figures follow from that."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_model import SMALL, filled

from coat_jax.errors import UserError
from coat_jax.evaluation import Score, combine, perplexity, windows
from coat_jax.models import Batch

MODEL = filled(dataclasses.replace(SMALL, layers=1, context=32, dtype=jnp.float32))


def test_every_token_but_the_first_is_scored_once_after_half_a_window():
    for length, size in itertools.product(range(2, 60), range(2, 20)):
        text = list(range(length))
        scored = []
        for passage in windows(text, size):
            tokens = list(passage.tokens)
            assert len(tokens) <= size + 1
            assert tokens == text[tokens[0] : tokens[-1] + 1]
            assert passage.first >= min(size // 2, tokens[passage.first])
            scored += tokens[passage.first :]
        assert scored == text[1:]


def test_a_text_within_one_window_has_the_loss_of_training():
    text = np.random.default_rng(0).integers(0, 256, 33)
    (score,) = perplexity(MODEL, [text], [33])
    loss = float(jax.jit(MODEL.loss)(Batch(text[None, :-1], text[None, 1:])).mean)
    assert score.tokens == 32
    assert score.per_token == pytest.approx(loss, rel=1e-6)


def test_long_texts_are_scored_window_by_window():
    """Each by itself, in their order."""
    text = np.random.default_rng(0).integers(0, 256, 75)
    log_softmax = jax.jit(lambda tokens: jax.nn.log_softmax(MODEL(tokens[None])[0]))

    def log_p(begin, end):
        following = text[begin + 1 : end + 1]
        return np.asarray(log_softmax(text[begin:end]))[np.arange(end - begin), following]

    first, second, third = log_p(0, 32), log_p(16, 48), log_p(32, 64)
    last = log_p(48, 74)
    nats = -sum(np.sum(part) for part in (first, second[16:], third[16:], last[16:]))
    short, long = perplexity(MODEL, [text[:33], text], [33, 75], batch=3)
    assert (short.tokens, long.tokens) == (32, 74)
    assert short.nats == pytest.approx(-np.sum(first), rel=1e-5)
    assert long.nats == pytest.approx(nats, rel=1e-5)


def test_a_model_that_knows_nothing_takes_eight_bits_per_byte():
    ignorant = nnx.clone(MODEL)
    ignorant.head[...] = jnp.zeros_like(ignorant.head[...])
    text = list(b"\0" + b"the text" * 20)
    (score,) = perplexity(ignorant, [text], [160])
    assert score.perplexity == pytest.approx(256, rel=1e-5)
    assert score.bits_per_byte == pytest.approx(8, rel=1e-5)


def test_texts_add_up():
    one, other = Score(nats=10.0, tokens=5, size=20), Score(nats=2.0, tokens=1, size=10)
    both = combine([one, other])
    assert both == Score(12.0, 6, 30)
    assert both.per_token == 2.0
    assert both.perplexity == pytest.approx(math.e**2)
    assert both.bits_per_byte == pytest.approx(12 / math.log(2) / 30)
    assert Score(nats=1e6, tokens=1, size=1).perplexity == math.inf
    assert math.isnan(Score(nats=math.nan, tokens=1, size=1).perplexity)


@pytest.mark.parametrize(
    ("text", "window", "named"),
    [
        ([1], None, "has 1 tokens, .* one must come before it"),
        ([1, 2], 1, "A window of 1 must be from 2 to the model's context=32"),
        ([1] * 40, 33, "A window of 33 must be from 2"),
    ],
)
def test_texts_and_windows_without_a_score_are_refused(text, window, named):
    with pytest.raises(UserError, match=named):
        perplexity(MODEL, [text], [1], window=window)
