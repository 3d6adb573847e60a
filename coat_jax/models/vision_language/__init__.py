"""Vision-language models: a tower, a projector, and a decoder that reads images among its text.

Config, TowerConfig, ImageFormat    the config of a model; PRESETS, config_of by name
VisionLanguage, Batch               the NNX module, and what its loss takes
hf                                  SmolVLM and LLaVA, from and to Hugging Face folders
"""

from coat_jax.models.vision_language.config import PRESETS, Config, TowerConfig, config_of
from coat_jax.models.vision_language.images import ImageFormat
from coat_jax.models.vision_language.model import Batch, VisionLanguage

__all__ = [
    "PRESETS",
    "Batch",
    "Config",
    "ImageFormat",
    "TowerConfig",
    "VisionLanguage",
    "config_of",
    "hf",
]

from coat_jax.models.vision_language import hf
