"""Named arrays of any model, which `jax.checkpoint` saves in 8 bits for the backward pass.

save_fp8       names an array
policies       says which names a checkpoint saves
saved_bytes    counts what a function saves, by name
"""

from coat_jax.residuals import policies
from coat_jax.residuals.counting import saved_bytes
from coat_jax.residuals.saving import save_fp8

__all__ = ["policies", "save_fp8", "saved_bytes"]
