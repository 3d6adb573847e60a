"""Attention, and attention with its output projection, which save the same.

    o = softmax(q k^T / sqrt(H)) v        causal or full, in a window, within segments
    y = o w + b

    attention_block    attention saves                             attention_linear adds
    None               q, k, v, o in their own dtype               nothing: o is its input
    16, 32, ..         q, k, v, o in FP8 blocks                    nothing: o is its input

and, with cuDNN, the log-sum-exp of each row.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from coat_jax import probes
from coat_jax.errors import UserError
from coat_jax.kernels.dispatch import Implementation
from coat_jax.kernels.rotary import join_heads
from coat_jax.numerics.explicit_axes import explicit_spec, merge_specs, shard_inside
from coat_jax.ops import recording
from coat_jax.ops.backward import define_op
from coat_jax.ops.checks import (
    require_array,
    require_layers,
    require_real,
)
from coat_jax.ops.saved.array import restore
from coat_jax.ops.saved.attention import (
    AttentionSettings,
    Backend,
    SavedAttention,
    recompute_attention,
    save_attention,
)
from coat_jax.ops.saved.projection import (
    Mode,
    Scales,
    bias_gradients,
    fp8_scale,
    gradient_operand,
    input_gradient,
    mode_of,
    project,
    quantize_input,
    recompute_input,
    weight_gradients,
)
from coat_jax.precision import COAT, Precision, precision_of
from coat_jax.probes import Probe

MAX_CUDNN_HEAD = 128


def attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    causal: bool = True,
    window: int | None = None,
    segments: Int[Array, "B S"] | None = None,
    scale: float | None = None,
    precision: Precision | str = COAT,
    backend: Backend | None = None,
) -> Float[Array, "B S N H"]:
    """Scaled dot-product attention.

    Args:
        q: queries of N heads.
        k: keys of K heads, where K divides N: each serves N / K query heads.
        v: values of K heads.
        causal: whether a token sees only itself and those before it. Queries and keys are both
            counted from the first token; for one new token, use `attention_to_past`.
        window: how many tokens it sees, itself included; None for all. Needs causal.
        segments: the number of each token's document; attention stays within a document.
        scale: of the scores, 1 / sqrt(H) by default.
        precision: only `attention_block` and its format `forward` matter here; for the saved output
            also `exact_forward` and `stochastic`.
        backend: "cudnn" or "xla"; None chooses cuDNN on a GPU for 16-bit arrays.
    """
    settings = _settings(q, k, v, causal, window, segments, scale, precision, backend)
    probe = probes.probe("attention", recording.attention_blocks(settings.precision))
    op = partial(_attention, settings)
    return shard_inside(op, lambda: merge_specs(*explicit_spec(q)), q, k, v, segments, probe)


def attention_linear(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    weight: Float[Array, "NH D"],
    bias: Float[Array, " D"] | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
    segments: Int[Array, "B S"] | None = None,
    scale: float | None = None,
    precision: Precision | str = COAT,
    backend: Backend | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B S D"]:
    """`attention` with its heads joined, times `weight`; saves no more than `attention` does.

    Args:
        q: see `attention`.
        k: see `attention`.
        v: see `attention`.
        weight: the output projection.
        bias: of the output projection.
        causal: see `attention`.
        window: see `attention`.
        segments: see `attention`.
        scale: see `attention`.
        precision: see `coat.Precision`.
        backend: see `attention`.
        implementation: of the projection: "xla", "triton", or None to choose by the device.
    """
    settings = _settings(q, k, v, causal, window, segments, scale, precision, backend)
    require_layers("attention_linear", q.shape[2] * q.shape[3], (weight,), (bias,))
    mode = mode_of(precision, implementation)
    probe = recording.probe_of_layers(
        "attention_linear",
        mode,
        ("out",),
        operands=("out/input", *recording.attention_blocks(settings.precision)),
    )
    op = partial(_attention_linear, (settings, mode))

    def result() -> PartitionSpec:
        return merge_specs(*explicit_spec(q)[:2], explicit_spec(weight)[1])

    return shard_inside(op, result, q, k, v, segments, weight, bias, probe)


def _settings(
    q: Array,
    k: Array,
    v: Array,
    causal: bool,
    window: int | None,
    segments: Array | None,
    scale: float | None,
    precision: Precision | str,
    backend: Backend | None,
) -> AttentionSettings:
    """The checked settings."""
    for array in (q, k, v):
        require_real("attention", array)
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape:
        raise ValueError(
            f"attention takes q [B, S, N, H] and k, v [B, T, K, H], not {q.shape}, {k.shape} and "
            f"{v.shape}."
        )
    heads, kv_heads, head_dim = q.shape[2], k.shape[2], q.shape[3]
    if q.shape[0] != k.shape[0] or head_dim != k.shape[3] or not kv_heads or heads % kv_heads:
        raise ValueError(
            f"q {q.shape} and k {k.shape} do not fit: batch and head sizes must be equal, and the "
            "number of key heads must divide that of query heads."
        )
    if head_dim == 0:
        raise ValueError(f"attention takes heads of at least one number, not q {q.shape}.")
    if window is not None:
        _require_window(window, causal)
    if segments is not None:
        require_array("segments", segments)
        if segments.shape != q.shape[:2] or q.shape[1] != k.shape[1]:
            raise ValueError(
                f"segments {segments.shape} must number the tokens of q {q.shape[:2]} and of k."
            )
    if backend not in (None, "cudnn", "xla"):
        raise ValueError(f'backend={backend!r} must be None, "cudnn" or "xla".')
    if backend is None:
        half = q.dtype in (jnp.bfloat16, jnp.float16)
        backend = "cudnn" if jax.default_backend() == "gpu" and half else "xla"
    if backend == "cudnn" and (head_dim > MAX_CUDNN_HEAD or head_dim % 8):
        raise UserError(
            f"cuDNN's attention takes heads of up to {MAX_CUDNN_HEAD} numbers, a multiple of 8, "
            f'not {head_dim}. Use backend="xla".'
        )
    scale = head_dim**-0.5 if scale is None else scale
    if isinstance(scale, jax.core.Tracer) or not jnp.isscalar(scale) or isinstance(scale, str):
        raise TypeError(
            f"scale={scale!r} must be a Python number: it is fixed when a program is compiled."
        )
    if not math.isfinite(scale):
        raise ValueError(f"scale={scale} must be finite.")
    return AttentionSettings(causal, window, float(scale), precision_of(precision), backend)


def _require_window(window: Any, causal: bool) -> None:
    if isinstance(window, bool) or not isinstance(window, int | np.integer):
        raise TypeError(f"window={window!r} must be a whole number of tokens, or None.")
    if window < 1 or not causal:
        raise ValueError(f"window={window} needs causal=True and at least one token.")


# --- attention -------------------------------------------------------------------------------


def _attention_forward(
    settings: AttentionSettings, q: Array, k: Array, v: Array, segments: Array | None
) -> Any:
    o, saved = save_attention(settings, q, k, v, segments)

    def record(probe: Probe) -> Probe:
        return recording.attention(probe, (q, k, v), o, saved, settings)

    return o, (saved, segments), record


def _attention_backward(
    settings: AttentionSettings, saved: SavedAttention, segments: Array | None, do: Array
) -> Any:
    _, pull = recompute_attention(settings, saved, segments, do.dtype)
    return (*pull(do), None), lambda probe: probe


_attention = define_op(
    "attention",
    _attention_forward,
    _attention_backward,
    rounds=lambda settings: settings.precision.attention_block is not None,
)


# --- attention_linear ------------------------------------------------------------------------

_Static = tuple[AttentionSettings, Mode]


def _attention_linear_forward(
    static: _Static,
    q: Array,
    k: Array,
    v: Array,
    segments: Array | None,
    weight: Array,
    bias: Array | None,
) -> Any:
    settings, mode = static
    output, saved = save_attention(settings, q, k, v, segments)
    exact = settings.precision.exact_forward
    o = output if exact else restore(saved.output, q.dtype, settings.precision.attention_block)
    n = quantize_input(join_heads(o), q.dtype, mode)
    scale = fp8_scale(n, mode)
    (y,), scales = project(n, (weight,), (bias,), q.dtype, mode)

    def record(probe: Probe) -> Probe:
        probe = recording.attention(probe, (q, k, v), output, saved, settings)
        return recording.products(
            probe, "out/input", lambda: join_heads(o), scale, (weight,), scales, mode
        )

    return y, (saved, scale, segments, weight, scales, bias), record


def _attention_linear_backward(
    static: _Static,
    saved: SavedAttention,
    scale: Array | None,
    segments: Array | None,
    weight: Array,
    scales: Scales,
    bias: Array | None,
    dy: Array,
) -> Any:
    settings, mode = static
    o, pull = recompute_attention(settings, saved, segments, dy.dtype)
    n = recompute_input(join_heads(o), scale, dy.dtype, mode)
    g = [gradient_operand(dy, mode)]
    do = input_gradient((weight,), scales, g, o.dtype, mode).reshape(o.shape)
    (d_weight,) = weight_gradients(n, (weight,), g)
    (d_bias,) = bias_gradients((bias,), (dy,))
    return (*pull(do), None, d_weight, d_bias), lambda probe: recording.gradients(
        probe, lambda: (dy,), g, mode
    )


def _rounds_attention(static: _Static) -> bool:
    precision = static[0].precision
    return precision.fp8_linear or precision.attention_block is not None


_attention_linear = define_op(
    "attention_linear",
    _attention_linear_forward,
    _attention_linear_backward,
    rounds=_rounds_attention,
)
