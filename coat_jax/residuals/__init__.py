"""What `jax.checkpoint` saves in 8 bits for the backward pass: see `coat.save_fp8`.

policies       say which named arrays a checkpoint saves
saved_bytes    counts what a function saves, by name
"""

from coat_jax.residuals import policies
from coat_jax.residuals.counting import saved_bytes

__all__ = ["policies", "saved_bytes"]
