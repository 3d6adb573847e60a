"""A text, and small models quantized with its ranges, for tests of quantization."""

import numpy as np
from small_model import SMALL

from coat_jax import quantization as q

TOKENS = np.random.default_rng(0).integers(0, SMALL.vocab, (2, 2, 16))


def quantized(model, **recipe):
    recipe = q.Recipe(**recipe)
    ranges = q.calibrate(model, TOKENS, recipe) if recipe.needs_calibration else None
    return q.quantize(model, recipe, ranges)
