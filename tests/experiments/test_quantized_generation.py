"""The models that `experiments.quantized_generation` measures are what they are called."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from coat_jax.quantization import Scheme, schemes_of
from experiments.quantized_generation import CASES, MORE_CASES, model_of


@pytest.fixture(scope="module")
def wide():
    """The bytes of the model in BF16."""
    return nbytes(model_of("llama_tiny", "bf16", 16))


@pytest.mark.costly
@pytest.mark.parametrize("case", CASES + MORE_CASES)
def test_models_have_the_scheme_of_their_case(case, wide):
    """And compute numbers, from as many bytes: of projections half or a quarter as many as BF16."""
    model = model_of("llama_tiny", case, 16)
    format, _, activations = case.partition(":")
    size = nbytes(model)
    if format == "bf16":
        assert size == wide
    else:
        assert set(schemes_of(model).values()) == {Scheme(format, activations or "dynamic")}
        share = 0.25 if format == "int4" else 0.5
        assert share * wide < size < (share + 0.1) * wide
    assert jnp.isfinite(model(jnp.ones((1, 4), jnp.int32))).all()


def nbytes(model):
    return sum(array.nbytes for array in jax.tree.leaves(nnx.state(model)))
