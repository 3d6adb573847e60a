"""Policies for `jax.checkpoint`, which also Flax's and equinox's checkpoints take."""

from collections.abc import Callable
from typing import Any

from coat_jax.ops.saving import SaveFP8


def save_fp8(
    *names: str, otherwise: Callable[..., Any] | None = None, offload: bool = False
) -> SaveFP8:
    """Saves the arrays of `coat.save_fp8` that have these names, in 8 bits.

    Args:
        names: of the arrays.
        otherwise: the policy for everything else, such as
            `jax.checkpoint_policies.dots_saveable`; None recomputes it.
        offload: whether codes are kept in pinned host memory until the backward pass.
    """
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError('save_fp8 takes names, as in coat.policies.save_fp8("hidden").')
    if not (otherwise is None or callable(otherwise)):
        raise TypeError(
            f"otherwise={otherwise!r} is not a policy, such as "
            "jax.checkpoint_policies.dots_saveable."
        )
    return SaveFP8(names, otherwise, offload)
