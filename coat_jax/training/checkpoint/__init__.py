"""A run on disk: complete or absent, checked before use, and converted to Hugging Face folders.

checkpoints     states of a run, written in the background
step_folders    one folder for each step, complete or absent
weights         the parameters without the rest of the state
conversion      to Hugging Face folders, balanced or in 8 bits
tokenizer_files the small files beside weights: tokenizer, generation settings

The checksums of a folder's files are written and compared by `coat_jax.manifest`.
"""

from coat_jax.training.checkpoint.checkpoints import Checkpoints

__all__ = ["Checkpoints"]
