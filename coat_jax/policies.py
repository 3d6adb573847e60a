"""Policies for `jax.checkpoint`."""

from coat_jax.residuals import policy as save_fp8

__all__ = ["save_fp8"]
