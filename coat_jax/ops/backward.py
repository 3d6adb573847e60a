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

from coat_jax.ops.saved.projection import Mode
from coat_jax.probes import Probe

Record = Callable[[Probe], Probe]


def define_op(
    name: str,
    forward: Callable[..., tuple[Any, tuple[Any, ...], Record]],
    backward: Callable[..., tuple[tuple[Any, ...], Record]],
    *,
    rounds: Callable[[Any], bool],
) -> Callable[..., Any]:
    """Returns an op with a gradient of its own: a function of (settings, *arrays, probe).

    The gradient of its probe is what `record(probe)` returns, which is called only with telemetry:
    the probe with the statistics of what the forward or the backward pass rounded.

    Args:
        name: of the op, for errors.
        forward: (settings, *arrays) -> result, residuals, record.
        backward: (settings, *residuals, gradient) -> gradients of the arrays, record.
        rounds: whether an op with these settings rounds to FP8, so that it can be differentiated
            only once.
    """

    def op(settings: Any, *arrays: Any) -> Any:
        return save(settings, *arrays)[0]

    def save(settings: Any, *arrays_and_probe: Any) -> tuple[Any, tuple[Any, ...]]:
        *arrays, probe = arrays_and_probe
        result, residuals, record = forward(settings, *arrays)
        return result, (*residuals, probe and record(probe))

    def differentiate(settings: Any, saved: tuple[Any, ...], gradient: Any) -> tuple[Any, ...]:
        def pull(*saved_and_gradient: Any) -> tuple[Any, ...]:
            *residuals, probe, gradient = saved_and_gradient
            gradients, record = backward(settings, *residuals, gradient)
            return *gradients, probe and record(probe)

        # The gradient that is used bypasses the barrier, which would hide its sharding.
        saved, _ = lax.optimization_barrier((saved, gradient))
        if not rounds(settings):
            return pull(*saved, gradient)
        guarded = jax.custom_jvp(pull)

        @guarded.defjvp
        def refuse(primals: Any, tangents: Any) -> Any:
            raise TypeError(
                f"coat.ops.{name} in FP8 can be differentiated once only: rounding to FP8 has no "
                "second derivative. Use precision=coat.BF16 where you need Hessians."
            )

        results: tuple[Any, ...] = guarded(*saved, gradient)
        return results

    op.__name__ = name
    differentiable = jax.custom_vjp(op, nondiff_argnums=(0,))
    differentiable.defvjp(save, differentiate)
    return differentiable


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


def rounds_rows(mode: Mode) -> bool:
    """Whether a linear layer computes in FP8 or saves its residuals in FP8."""
    return mode.precision.fp8_linear or mode.precision.block is not None
