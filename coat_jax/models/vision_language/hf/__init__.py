"""Vision-language models from and to Hugging Face folders, in both directions bit for bit.

It has what `coat_jax.models.hf` has. A folder also says how pictures become pixels, in
preprocessor_config.json, and may have tensors that the model does not use, which are kept.
"""

from coat_jax.models.hf import FILE_BYTES
from coat_jax.models.vision_language.hf.config import ARCHITECTURES
from coat_jax.models.vision_language.hf.weights import load, read, read_config, save, write

__all__ = ["ARCHITECTURES", "FILE_BYTES", "load", "read", "read_config", "save", "write"]
