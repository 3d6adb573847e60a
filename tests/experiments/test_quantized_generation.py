"""The models that `experiments.quantized_generation` measures are what they are called."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from coat_jax.quantization import Scheme, schemes_of
from experiments.quantized_generation import CASES, arguments, model_of


@pytest.fixture(scope="module")
def wide():
    """The bytes of the model in BF16."""
    return nbytes(model_of("llama_tiny", "bf16", 16))


@pytest.mark.costly
@pytest.mark.parametrize("case", CASES)
def test_models_have_the_scheme_of_their_case(case, wide):
    """And compute numbers, from as many bytes: of the projections half as many as in BF16."""
    model = model_of("llama_tiny", case, 16)
    format, _, activations = case.partition(":")
    size = nbytes(model)
    if format == "bf16":
        assert size == wide
    else:
        assert set(schemes_of(model).values()) == {Scheme(format, activations or "dynamic")}
        assert 0.5 * wide < size < 0.6 * wide
    assert jnp.isfinite(model(jnp.ones((1, 4), jnp.int32))).all()


def nbytes(model):
    return sum(array.nbytes for array in jax.tree.leaves(nnx.state(model)))


def test_by_default_all_cases_are_measured():
    assert tuple(arguments().parse_args([]).cases) == CASES
