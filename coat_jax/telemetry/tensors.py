"""Statistics of the tensors that a loss function rounds to FP8, forward and backward.

    found = measure(loss, params, batch)
    found["layers/3/mlp/gate/gradient"].underflow

A separate program computes the loss and its gradients and returns a few sums for each tensor; run
it on a batch every n-th step. The training program does not change. Everything that
`coat_jax.ops` rounds is seen, whatever framework calls it, except in `adapted_linear` and
`quantized_linear`; and so are the arrays of `coat.save_fp8`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from coat_jax.numerics import statistics
from coat_jax.numerics.statistics import Statistics
from coat_jax.probes import Found, Scope, current_scope


def measure(loss: Callable[..., Any], *args: Any) -> dict[str, Statistics]:
    """Returns statistics of each tensor that `loss(*args)` and its gradients round to FP8, by name.

    This compiles once for each function and shapes of arguments, so pass the same function. Tensors
    that the gradients do not need are left out, and so is all that is not FP8.

    Args:
        loss: a function to a number, or to a tuple whose first element it is. It may use jit,
            scan, remat and vmap. A tensor inside a scan or vmap of your own counts as one tensor.
        *args: trees of arrays.

    Example:
        >>> import coat_jax as coat, jax.numpy as jnp
        >>> def loss(w, x):
        ...     with coat.telemetry.named("first"):
        ...         return jnp.mean(coat.ops.linear(x, w) ** 2)
        >>> found = coat.telemetry.measure(loss, jnp.eye(32), jnp.full((4, 32), 1.5))
        >>> sorted(found)
        ['first/gradient', 'first/input', 'first/weight']
        >>> found["first/input"].error
        0.0
    """
    return report(jax.device_get(_compute_sums(loss, *args)))


def sums_and_gradients(
    loss: Callable[..., Any], params: Any, *args: Any
) -> tuple[dict[str, Array], Any]:
    """Returns the argument of `report`, and the gradients of `params`: for a program of your own.

    Sums of several batches may be added.

    Args:
        loss: of params and args; see `measure`.
        params: what is differentiated.
        *args: its other arguments.
    """
    found = Found()
    with current_scope(Scope(found, None)):
        jax.eval_shape(loss, params, *args)

    def watched_loss(probes: Mapping[str, Array], params: Any) -> Array:
        with current_scope(Scope(found, probes)):
            result = loss(params, *args)
        return result[0] if isinstance(result, tuple) else result

    zeros = jnp.zeros(statistics.NUMBERS, jnp.float32)
    probes = {n: zeros if k is None else jnp.tile(zeros, (k, 1)) for n, k in found.items()}
    sums, grads = jax.grad(watched_loss, argnums=(0, 1))(probes, params)
    return sums, grads


def report(sums: Mapping[str, Float[np.ndarray, "..."]]) -> dict[str, Statistics]:
    """Returns the statistics of sums on the host; layers are numbered, unseen tensors left out."""
    return {
        name.replace("*", str(layer), 1): statistics.of_sums(row)
        for name, numbers in sums.items()
        for layer, row in enumerate(np.atleast_2d(numbers))
        if row[0]
    }


@partial(jax.jit, static_argnums=0)
def _compute_sums(loss: Callable[..., Any], *args: Any) -> dict[str, Array]:
    def without_params(_: None, *args: Any) -> Any:
        return loss(*args)

    return sums_and_gradients(without_params, None, *args)[0]
