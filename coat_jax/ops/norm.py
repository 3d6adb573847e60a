"""A norm by itself: of queries and keys, after a block, before the head.

y = norm(x)         saves x in FP8 blocks, or as it is, and one or two numbers per row
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from coat_jax import probes
from coat_jax.kernels.norm import Norm, Stats, normalize, normalize_backward, statistics
from coat_jax.numerics.explicit_axes import explicit_spec, merge_specs, shard_inside
from coat_jax.ops import recording
from coat_jax.ops.backward import define_op
from coat_jax.ops.checks import require_columns, require_norm
from coat_jax.ops.saved.array import SavedArray, restore, round_and_save
from coat_jax.precision import COAT, Precision, precision_of
from coat_jax.probes import Probe


def norm(
    x: Float[Array, "*rows D"], norm: Norm, *, precision: Precision | str = COAT
) -> Float[Array, "*rows D"]:
    """RMSNorm or LayerNorm of the last axis, in the dtype of `x`.

    Args:
        x: the input, of any leading shape.
        norm: its parameters, and how it is computed.
        precision: only its `block`, `forward`, `exact_forward` and `stochastic` matter here.
    """
    require_columns("norm", x)
    require_norm("norm", x.shape[-1], norm)
    precision = precision_of(precision)
    probe = probes.probe("norm", () if precision.block is None else ("saved",))
    op = partial(_norm, precision)
    return shard_inside(op, lambda: merge_specs(*explicit_spec(x)), x, norm, probe)


def _forward(precision: Precision, x: Array, norm: Norm) -> Any:
    saved, values = round_and_save(x, precision)
    stats = statistics(values, norm)

    def record(probe: Probe) -> Probe:
        return recording.saved(probe, "saved", x, saved, precision.block, precision.forward)

    return normalize(values, stats, norm).astype(x.dtype), (saved, stats, norm), record


def _backward(precision: Precision, saved: SavedArray, stats: Stats, norm: Norm, dy: Array) -> Any:
    values = restore(saved, jnp.float32, precision.block)
    dx, d_norm = normalize_backward(values, stats, norm, dy)
    return (dx.astype(dy.dtype), d_norm), lambda probe: probe


_norm = define_op("norm", _forward, _backward, rounds=lambda precision: precision.block is not None)
