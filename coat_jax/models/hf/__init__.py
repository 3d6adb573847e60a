"""Models from and to Hugging Face folders, in both directions bit for bit.

    model = coat.models.hf.load("Llama-3.1-8B", mesh=mesh)
    coat.models.hf.save("out", model, dtype=jnp.bfloat16)

    config = dataclasses.replace(hf.read_config(folder), precision="coat", remat="layer")
    model = hf.load(folder, config)

`config` translates config.json, `names` the names and shapes of tensors; `files` reads and writes
safetensors; `weights` puts these together. A tokenizer is not part of a model.
"""

from coat_jax.models.hf.config import ARCHITECTURES, architecture_in
from coat_jax.models.hf.weights import FILE_BYTES, load, read, read_config, save, write

__all__ = [
    "ARCHITECTURES",
    "FILE_BYTES",
    "architecture_in",
    "load",
    "read",
    "read_config",
    "save",
    "write",
]
