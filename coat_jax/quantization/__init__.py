"""Post-training quantization: models whose linear layers are in 8 or 4 bits.

    Recipe            which format, how ranges are found, how activations are rounded
    calibrate         statistics of activations on some text: ranges, and for INT4 products
    balance           a model that computes the same, with smaller outliers in its activations
    quantize          a model in memory, by a recipe
    load, save        folders in compressed-tensors' layout, which vLLM and transformers read
    save_quantized    quantizes a model that is in files, one parameter at a time

    recipe = Recipe(format="int8", activations="static")
    small = quantize(model, recipe, calibrate(model, batches, recipe))

`projections` lists what is quantized; `nn.modular` and `nn.quantized` have the layers.
"""

from coat_jax.quantization.balancing import balance
from coat_jax.quantization.calibration import Inputs, Ranges, calibrate
from coat_jax.quantization.folders import load, read_config, save, save_quantized
from coat_jax.quantization.projections import inference_config, is_quantized
from coat_jax.quantization.quantize import abstract, quantize, schemes_of
from coat_jax.quantization.recipe import Recipe, Scheme

__all__ = [
    "Inputs",
    "Ranges",
    "Recipe",
    "Scheme",
    "abstract",
    "balance",
    "calibrate",
    "inference_config",
    "is_quantized",
    "load",
    "quantize",
    "read_config",
    "save",
    "save_quantized",
    "schemes_of",
]
