"""A backward pass that refuses to be differentiated, instead of giving wrong second derivatives."""

from collections.abc import Callable
from typing import Any

import jax


def once_differentiable(backward: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`backward` of the operation `name`, raising where something differentiates it."""
    guarded = jax.custom_jvp(backward)

    @guarded.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        raise TypeError(
            f"coat.ops.{name} in FP8 can be differentiated once only: rounding to FP8 has no "
            "second derivative. Use precision=coat.BF16 where you need Hessians."
        )

    return guarded
