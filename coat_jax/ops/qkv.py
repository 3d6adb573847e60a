"""From the residual stream to the heads of attention.

    q, k, v = norm(x) w_i + b_i        q and k rotated by position

Saves x, as `norm_linear` does. x is also returned, for the residual sum: the gradient of that sum
is then added where the gradient of the norm is computed, not in a separate pass. Likewise the
gradients of q and k are rotated back in the pass that rounds them for their products.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from coat_jax.kernels import gemm
from coat_jax.kernels.dispatch import Implementation
from coat_jax.kernels.gemm import Operand
from coat_jax.kernels.norm import Norm
from coat_jax.kernels.rotary import (
    GROWTH,
    join_heads,
    rotary_backward,
    rotary_backward_cast,
    rotary_forward,
    split_heads,
    supports_head_dim,
)
from coat_jax.numerics.explicit_axes import explicit_spec, merge_specs, of_heads, shard_inside
from coat_jax.ops import recording
from coat_jax.ops.backward import batched_alike, define_op, rounds_rows
from coat_jax.ops.checks import (
    require_layers,
    require_norm,
    require_real,
)
from coat_jax.ops.rotary import Rotary, require_rotary
from coat_jax.ops.saved.norm import SavedNorm, norm_gradient, recompute_norm, save_norm
from coat_jax.ops.saved.projection import (
    Biases,
    Mode,
    Scales,
    Weights,
    as_layers,
    bias_gradients,
    gradient_operand,
    input_gradient,
    mode_of,
    project,
    weight_gradients,
)
from coat_jax.precision import COAT, Precision
from coat_jax.probes import Probe

Heads = Float[Array, "B S N H"]
ROTATED = (True, True, False)  # q, k, v
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
    ws, bs = as_layers(tuple(weights), biases)
    require_norm("norm_qkv", x.shape[-1], norm)
    require_layers("norm_qkv", x.shape[-1], ws, bs)
    whole = isinstance(head_dim, int) and head_dim > 0
    if not whole or len(ws) != len(ROTATED) or any(w.shape[1] % head_dim for w in ws):
        raise ValueError(
            f"norm_qkv takes three weights to whole heads of {head_dim=}, not "
            f"{[w.shape for w in ws]}."
        )
    if rotary is None:
        positions = None
    else:
        positions = jnp.arange(x.shape[1]) if positions is None else positions
        require_rotary(rotary, positions, x.shape[:2])
    settings = _QKVSettings(head_dim, rotary, mode_of(precision, implementation))
    probe = recording.probe_of_layers("norm_qkv", settings.mode, NAMES, blocks=("saved",))

    def specs() -> tuple[PartitionSpec, ...]:
        batch, sequence, _ = explicit_spec(x)
        heads = [of_heads(explicit_spec(w)[1], w.shape[1] // head_dim) for w in ws]
        return merge_specs(*explicit_spec(x)), *(
            merge_specs(batch, sequence, entry, None) for entry in heads
        )

    op = partial(_norm_qkv, settings)
    return shard_inside(op, specs, x, norm, ws, bs, positions, probe)


class _QKVSettings(NamedTuple):
    head_dim: int
    rotary: Rotary | None
    mode: Mode

    def angles(self, positions: Array | None) -> tuple[Array, Array] | None:
        """Cosines and sines of the rotation; None without one."""
        if self.rotary is None or positions is None:
            return None
        return self.rotary.cos_sin(positions, self.head_dim)


def _forward(
    settings: _QKVSettings,
    x: Array,
    norm: Norm,
    weights: Weights,
    biases: Biases,
    positions: Array | None,
) -> Any:
    mode = settings.mode
    saved, n = save_norm(x, norm, mode)
    outputs, scales = project(n, weights, biases, x.dtype, mode)
    heads = [split_heads(y, settings.head_dim) for y in outputs]
    angles = settings.angles(positions)
    if angles is not None:
        heads = [
            rotary_forward(y, *angles) if is_rotated else y
            for y, is_rotated in zip(heads, ROTATED, strict=True)
        ]

    def record(probe: Probe) -> Probe:
        return recording.norm(probe, x, saved, norm, weights, scales, mode)

    return batched_alike(x, *heads), (saved, norm, weights, scales, biases, positions), record


def _backward(
    settings: _QKVSettings,
    saved: SavedNorm,
    norm: Norm,
    weights: Weights,
    scales: Scales,
    biases: Biases,
    positions: Array | None,
    gradients: tuple[Array, ...],
) -> Any:
    mode = settings.mode
    residual, *heads = gradients
    angles = settings.angles(positions)
    back = [angles if is_rotated else None for is_rotated in ROTATED]
    n = recompute_norm(saved, norm, mode, residual.dtype)
    g = [_operand(dy, a, mode) for dy, a in zip(heads, back, strict=True)]
    dn = input_gradient(weights, scales, g, residual.dtype, mode)
    dx, d_norm = norm_gradient(saved, norm, dn, residual, mode)

    def unrotated() -> list[Array]:
        return [join_heads(_rotated_back(dy, a)) for dy, a in zip(heads, back, strict=True)]

    d_biases = biases
    if any(bias is not None for bias in biases):
        d_biases = bias_gradients(biases, unrotated())
    d_weights = weight_gradients(n, weights, g)
    return (dx, d_norm, d_weights, d_biases, None), lambda probe: recording.gradients(
        probe, unrotated, g, mode
    )


_norm_qkv = define_op(
    "norm_qkv", _forward, _backward, rounds=lambda settings: rounds_rows(settings.mode)
)


def _operand(dy: Heads, angles: tuple[Array, Array] | None, mode: Mode) -> Operand:
    """The gradient of heads before their rotation, as an operand of products."""
    dtype, stream = mode.gradient_format, mode.stream("gradients")
    if angles is None or dtype is None:
        return gradient_operand(join_heads(_rotated_back(dy, angles)), mode)
    scale = gemm.tensor_scale(GROWTH * gemm.largest_magnitude(dy), dtype)
    if mode.implementation == "triton" and supports_head_dim(dy.shape[-1]):
        codes = rotary_backward_cast(dy, *angles, scale, dtype, stream=stream)
        return Operand(*codes, scale)
    rotated = join_heads(_rotated_back(dy, angles))
    return gemm.scaled(rotated, scale, dtype, "both", mode.implementation, stream=stream)


def _rotated_back(dy: Heads, angles: tuple[Array, Array] | None) -> Heads:
    return dy if angles is None else rotary_backward(dy, *angles)
