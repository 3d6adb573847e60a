"""Decoders of Llama's kind: Llama, Mistral, Qwen 2 and 3, OLMo 1 and 2, and their MoE models.

    Config, PRESETS, config_of     the config of a model, and published ones by name
    Experts                        what a Config says of a mixture of experts
    Llama, Batch, Loss             the NNX module; what its loss takes and returns
    ModelConfig                    what the configs of other kinds of models begin with
    create, abstract               a new model on a mesh, each device with its own shards
    parameters_count               how many parameters a config has
    hf                             weights from and to Hugging Face folders
    vision_language                models of images and text, with such a decoder

All families of decoders are one module; a `Config` holds what differs.
"""

from coat_jax.models import hf, vision_language
from coat_jax.models.batches import Batch
from coat_jax.models.config import PRESETS, Config, Experts, config_of
from coat_jax.models.creation import abstract, create
from coat_jax.models.lazy_arrays import parameters_count
from coat_jax.models.llama import Llama
from coat_jax.models.protocol import Loss, ModelConfig

__all__ = [
    "PRESETS",
    "Batch",
    "Config",
    "Experts",
    "Llama",
    "Loss",
    "ModelConfig",
    "abstract",
    "config_of",
    "create",
    "hf",
    "parameters_count",
    "vision_language",
]
