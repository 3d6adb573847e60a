"""What is no model of this package is refused in one line, also where arguments are swapped."""

import pytest
from flax import nnx

from coat_jax import evaluation, generation, models, quantization

MODEL = nnx.merge(*models.abstract(models.config_of("tiny")))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: models.hf.save(MODEL, "folder"), r"hf\.save\(folder, model\) takes"),
        (lambda: quantization.save(MODEL, "folder"), r"quantization\.save\(folder, model\) takes"),
        (lambda: quantization.balance("folder", []), "quantization takes"),
        (lambda: generation.generate("folder", [[1]], max_tokens=1), "generation takes"),
        (lambda: evaluation.perplexity("folder", [[1, 2]], [2]), "perplexity takes"),
    ],
)
def test_another_argument_than_a_model_is_refused(call, said):
    with pytest.raises(TypeError, match=rf"{said} a model with .*, not str\."):
        call()
