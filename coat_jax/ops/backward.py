"""What the backward passes of all ops have in common.

**The backward pass begins when the gradient arrives.** A barrier ties the residuals to the
gradient. Without it, XLA would see that the backward pass recomputes values of the forward pass,
and keep these in memory instead of the smaller residuals.

**Under vmap, all outputs of an op have a batch, or none.** JAX does not batch an output that does
not depend on what is mapped over. It sums the gradient of this output over the batch, and passes
the sum to the backward pass of each element, whose results it sums again. So if one output has a
batch, `batched_alike` gives one to all.

**The backward pass cannot be differentiated.** Rounding has no second derivative, so asking for one
is an error.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jaxtyping import Array

from coat_jax.precision import Precision


def run_backward(
    backward: Callable[..., Any],
    residuals: tuple[Any, ...],
    gradient: Any,
    *,
    name: str,
    rounds: bool,
) -> Any:
    """`backward(*residuals, gradient)`.

    Args:
        backward: the gradients as a function of the residuals and of the result's gradient.
        residuals: what the forward pass saved.
        gradient: of the result.
        name: of the operation, for the error.
        rounds: whether it rounds to FP8, so that it can be differentiated only once.
    """
    # The gradient that is used bypasses the barrier, which would hide its sharding.
    residuals, _ = lax.optimization_barrier((residuals, gradient))
    if not rounds:
        return backward(*residuals, gradient)
    guarded = jax.custom_jvp(backward)

    @guarded.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        raise TypeError(
            f"coat.ops.{name} in FP8 can be differentiated once only: rounding to FP8 has no "
            "second derivative. Use precision=coat.BF16 where you need Hessians."
        )

    return guarded(*residuals, gradient)


@jax.custom_jvp
def batched_alike(*outputs: Array) -> tuple[Array, ...]:
    """Returns the outputs of a forward pass; under vmap, if one is batched, all are."""
    return _batched_alike(*outputs)


@batched_alike.defjvp
def _tangents(
    primals: tuple[Array, ...], tangents: tuple[Array, ...]
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    return batched_alike(*primals), tangents


@custom_vmap
def _batched_alike(*outputs: Array) -> tuple[Array, ...]:
    return outputs


@_batched_alike.def_vmap
def _with_batch(
    size: int, batched: tuple[bool, ...], *outputs: Array
) -> tuple[tuple[Array, ...], tuple[bool, ...]]:
    whole = tuple(
        y if has_batch else jnp.broadcast_to(y, (size, *y.shape))
        for y, has_batch in zip(outputs, batched, strict=True)
    )
    return whole, (True,) * len(whole)


def rounds_rows(precision: Precision) -> bool:
    """Whether a linear layer computes in FP8 or saves its residuals in FP8."""
    return precision.fp8_linear or precision.block is not None
