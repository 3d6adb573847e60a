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


# cuDNN rounds the softmax to BF16, and the cache's attention does not: some 2^-8 between them. In
# FP8 that turns a code where a value lies on the edge; E4M3's codes are 2^-3 apart, so each product
# is off by sqrt(2^-8 2^-3) of its size, and seven stand one behind the other after the first
# attention: 2^-5.5 sqrt(7) = 2^-4.1.
@pytest.mark.parametrize(
    ("precision", "typical"), [("bf16", 2**-6), ("coat", 2**-4), ("coat_lean", 2**-4)]
)
def test_logits_are_those_of_the_training_forward(precision, typical):
    """As on a CPU: see test_cache."""
    model = filled(variant(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, precision=precision))
    got, wanted = logits_one_by_one(model)[0], logits_at_once(model)
    off = np.abs(got - wanted).max(axis=-1) / np.abs(wanted).max(axis=-1)
    assert off.max() < 1 / 8
    assert np.median(off) < typical


@pytest.mark.parametrize("precision", ["bf16", "coat"])
def test_a_single_text_is_continued(precision):
    """A token at a time: products of a single row."""
    model = filled(variant(dtype=jnp.bfloat16, precision=precision))
    alone = generate(model, [[1, 2, 3]], max_tokens=20, sampling=Sampling(temperature=0))
    assert [len(text) for text in alone] == [20]
