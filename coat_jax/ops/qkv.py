"""From the residual stream to the heads of attention.

    q, k, v = norm(x) w_i + b_i        q and k rotated by position

Saves x, as `norm_linear` does. x is also returned, for the residual sum: the gradient of that sum
is then added where the gradient of the norm is computed, not in a separate pass. Likewise the
gradients of q and k are rotated back in the pass that rounds them for their products.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from coat_jax.kernels import gemm
from coat_jax.kernels.dispatch import Implementation
from coat_jax.kernels.gemm import Operand
from coat_jax.kernels.norm import Norm
from coat_jax.kernels.rotary import (
    GROWTH,
    rotary_backward,
    rotary_backward_cast,
    supports_head_dim,
)
from coat_jax.numerics.explicit_axes import explicit_spec, merge_specs, of_heads
from coat_jax.ops import recording
from coat_jax.ops.checks import require_norm, require_real
from coat_jax.ops.definition import batch_alike, define_op
from coat_jax.ops.norm import SavedNorm, norm_gradient, recompute_norm, save_norm
from coat_jax.ops.projection import (
    Layers,
    Mode,
    Scales,
    as_layers,
    gradient_operand,
    input_gradient,
    mode_of,
    parameter_gradients,
    project,
)
from coat_jax.ops.rotary import (
    Rotary,
    join_heads,
    require_rotary,
    rotary_forward,
    split_heads,
)
from coat_jax.precision import COAT, Precision

Heads = Float[Array, "B S N H"]
NAMES = ("query", "key", "value")


def norm_qkv(
    x: Float[Array, "B S D"],
    norm: Norm,
    weights: Sequence[Float[Array, "D NH"]],
    biases: Sequence[Float[Array, " NH"] | None] | None = None,
    *,
    head_dim: int,
    rotary: Rotary | None = None,
    positions: Int[Array, "*B S"] | None = None,
    precision: Precision | str = COAT,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B S D"], Heads, Heads, Heads]:
    """x, for the residual sum; queries, keys and values.

    Args:
        x: the residual stream.
        norm: RMSNorm or LayerNorm.
        weights: three, to queries, keys and values; any number of heads each.
        biases: one per weight, None where there is none.
        head_dim: numbers per head.
        rotary: how queries and keys are rotated; None if they are not.
        positions: of each token, [S] or [B, S]; 0 .. S - 1 by default.
        precision: see `coat.Precision`.
        implementation: "xla", "triton", or None to choose by the device.
    """
    require_real("norm_qkv", x)
    if x.ndim != 3:
        raise ValueError(f"norm_qkv takes x [batch, sequence, width], not {x.shape}.")
    require_norm("norm_qkv", x.shape[-1], norm)
    layers = as_layers("norm_qkv", x.shape[-1], tuple(weights), biases)
    whole = isinstance(head_dim, int) and head_dim > 0
    if not whole or len(weights) != len(NAMES) or any(w.shape[1] % head_dim for w in weights):
        raise ValueError(
            f"norm_qkv takes three weights to whole heads of {head_dim=}, not "
            f"{[w.shape for w in weights]}."
        )
    if rotary is None:
        positions = None
    else:
        positions = jnp.arange(x.shape[1]) if positions is None else positions
        require_rotary(rotary, positions, x.shape[:2])
    mode = mode_of(precision, implementation)
    return _norm_qkv(mode, (head_dim, rotary), x, norm, layers, positions)


def _specs(
    head_dim: int, rotary: Rotary | None, x: Array, norm: Norm, layers: Layers, *_: Array | None
) -> tuple[PartitionSpec, ...]:
    rows, weights = explicit_spec(x)[:2], layers.weights
    entries = [of_heads(explicit_spec(w)[1], w.shape[1] // head_dim) for w in weights]
    return merge_specs(*explicit_spec(x)), *(merge_specs(*rows, e, None) for e in entries)


def _forward(
    mode: Mode,
    head_dim: int,
    rotary: Rotary | None,
    x: Array,
    norm: Norm,
    layers: Layers,
    positions: Array | None,
) -> Any:
    saved, n = save_norm(x, norm, mode)
    outputs, scales, _ = project(n, layers, x.dtype, mode)
    q, k, v = (split_heads(y, head_dim) for y in outputs)
    if rotary is not None and positions is not None:
        angles = rotary.cos_sin(positions, head_dim)
        q, k = rotary_forward(q, *angles), rotary_forward(k, *angles)
    record = partial(recording.norm, x, saved, layers, scales, mode)
    return batch_alike(x, q, k, v), (saved, layers, scales, positions), record


def _backward(
    mode: Mode,
    head_dim: int,
    rotary: Rotary | None,
    saved: SavedNorm,
    layers: Layers,
    scales: Scales,
    positions: Array | None,
    gradients: tuple[Array, ...],
) -> Any:
    residual, *heads = gradients
    angles = None
    if rotary is not None and positions is not None:
        angles = rotary.cos_sin(positions, head_dim)
    back = (angles, angles, None)  # v is not rotated

    def unrotated() -> list[Array]:
        return [
            join_heads(dy if a is None else rotary_backward(dy, *a))
            for dy, a in zip(heads, back, strict=True)
        ]

    n = recompute_norm(saved, mode, residual.dtype)
    g = [_operand(dy, a, mode) for dy, a in zip(heads, back, strict=True)]
    dn = input_gradient(layers, scales, g, residual.dtype, mode)
    dx, d_norm = norm_gradient(saved, dn, residual, mode)
    d_layers = parameter_gradients(n, layers, g, unrotated)
    return (dx, d_norm, d_layers, None), lambda: recording.gradients(unrotated(), g, mode)


_norm_qkv = define_op(
    "norm_qkv",
    _forward,
    _backward,
    blocks=("saved",),
    operands=("input",),
    weights=NAMES,
    specs=_specs,
)


def _operand(dy: Heads, angles: tuple[Array, Array] | None, mode: Mode) -> Operand:
    """The gradient of heads before their rotation, as an operand of products."""
    if angles is None or mode.format is None:
        unrotated = dy if angles is None else rotary_backward(dy, *angles)
        return gradient_operand(join_heads(unrotated), mode)
    dtype, stream = mode.precision.backward, mode.stream("gradients")
    scale = gemm.tensor_scale(GROWTH * gemm.largest_magnitude(dy), dtype)
    if mode.implementation == "triton" and supports_head_dim(dy.shape[-1]):
        codes = rotary_backward_cast(dy, *angles, scale, dtype, stream=stream)
        return Operand(*codes, scale)
    rotated = join_heads(rotary_backward(dy, *angles))
    return gemm.operand(rotated, dtype, "both", mode.implementation, scale=scale, stream=stream)
