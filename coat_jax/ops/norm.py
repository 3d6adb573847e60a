"""A norm by itself: of queries and keys, after a block, before the head.

y = norm(x)         keeps x in FP8 blocks, or as it comes, and one or two numbers per row
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from coat_jax.kernels.norm import Norm, Stats, normalize, normalize_backward, statistics
from coat_jax.ops.backward import run_backward
from coat_jax.ops.checks import require_columns, require_norm
from coat_jax.ops.keep import Kept, keep_rows, restore
from coat_jax.precision import COAT, Precision, precision_of


def norm(
    x: Float[Array, "*rows D"], norm: Norm, *, precision: Precision | str = COAT
) -> Float[Array, "*rows D"]:
    """RMSNorm or LayerNorm of the last axis, in the dtype of `x`.

    Args:
        x: the input, of any leading shape.
        norm: what it learns, and how it is computed.
        precision: of which only `block` and `exact_forward` matter here.
    """
    require_columns("norm", x)
    require_norm("norm", x.shape[-1], norm)
    return _norm(precision_of(precision), x, norm)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm(precision: Precision, x: Array, norm: Norm) -> Array:
    return _forward(precision, x, norm)[0]


def _forward(precision: Precision, x: Array, norm: Norm) -> Any:
    kept, values = keep_rows(x, precision)
    stats = statistics(values, norm)
    return normalize(values, stats, norm).astype(x.dtype), (kept, stats, norm)


def _backward(precision: Precision, residuals: Any, gradient: Array) -> Any:
    def backward(kept: Kept, stats: Stats, norm: Norm, dy: Array) -> Any:
        values = restore(kept, jnp.float32, precision.block)
        dx, d_norm = normalize_backward(values, stats, norm, dy)
        return dx.astype(dy.dtype), d_norm

    rounds = precision.block is not None
    return run_backward(backward, residuals, gradient, name="norm", rounds=rounds)


_norm.defvjp(_forward, _backward)
