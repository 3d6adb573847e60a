"""Generation on a GPU: from a cache, a model says what it says in training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generation_cases import logits_at_once, logits_one_by_one, variant
from small_model import filled

from coat_jax.generation import Sampling, generate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU"),
]


@pytest.mark.parametrize("precision", ["bf16", "coat", "coat_lean"])
def test_logits_are_those_of_the_training_forward(precision):
    """As on a CPU: see test_cache. cuDNN rounds what attention's softmax gives to BF16, besides."""
    model = filled(variant(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, precision=precision))
    got, wanted = logits_one_by_one(model)[0], logits_at_once(model)
    off = np.abs(got - wanted).max(axis=-1) / np.abs(wanted).max(axis=-1)
    assert off.max() < 1 / 8
    assert np.median(off) < 2**-5


@pytest.mark.parametrize("precision", ["bf16", "coat"])
def test_a_single_text_is_continued(precision):
    """A token at a time: products of a single row."""
    model = filled(variant(dtype=jnp.bfloat16, precision=precision))
    alone = generate(model, [[1, 2, 3]], max_tokens=20, sampling=Sampling(temperature=0))
    assert [len(text) for text in alone] == [20]
