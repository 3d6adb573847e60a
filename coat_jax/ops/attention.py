"""Attention, and attention with its output projection, which save the same.

    o = softmax(q k^T / sqrt(H)) v        causal or full, in a window, within segments
    y = o w + b

    attention_block    attention saves                             attention_linear adds
    None               q, k, v, o in their own dtype               nothing: o is its input
    16, 32, ..         q, k, v, o in FP8 blocks                    nothing: o is its input

and, with cuDNN, the log-sum-exp of each row.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from coat_jax.errors import UserError
from coat_jax.kernels.dispatch import Implementation
from coat_jax.numerics.explicit_axes import explicit_spec, merge_specs
from coat_jax.ops import recording
from coat_jax.ops.checks import require_number, require_real
from coat_jax.ops.definition import SavedArray, define_op, restore, save_array
from coat_jax.ops.projection import (
    Layers,
    Mode,
    Scales,
    as_layers,
    fp8_scale,
    gradient_operand,
    input_gradient,
    mode_of,
    parameter_gradients,
    project,
    quantize_input,
    recompute_input,
)
from coat_jax.ops.rotary import join_heads
from coat_jax.precision import COAT, Precision, precision_of
from coat_jax.probes import Probe

MAX_CUDNN_HEAD = 128
BLOCKS = ("query/saved", "key/saved", "value/saved", "out/saved")  # their names in telemetry
Backend = Literal["cudnn", "xla"]


class AttentionSettings(NamedTuple):
    """The kind of attention, and how it is computed."""

    causal: bool
    window: int | None
    scale: float
    backend: Backend


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
        precision: only `attention_block`, `forward`, `exact_forward` and `stochastic` matter here.
        backend: "cudnn" or "xla"; None chooses cuDNN on a GPU for 16-bit arrays.
    """
    settings = _settings(q, k, v, causal, window, segments, scale, backend)
    mode = Mode(precision_of(precision), "xla")
    return _attention(mode, (settings,), (q, k, v), segments, None)


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

    It takes the arguments of `attention`, and these:

    Args:
        weight: the output projection.
        bias: of the output projection.
        implementation: of the projection: "xla", "triton", or None to choose by the device.
    """
    settings = _settings(q, k, v, causal, window, segments, scale, backend)
    layers = as_layers("attention_linear", q.shape[2] * q.shape[3], weight, bias)
    mode = mode_of(precision, implementation)
    return _attention_linear(mode, (settings,), (q, k, v), segments, layers)


def _settings(
    q: Array,
    k: Array,
    v: Array,
    causal: bool,
    window: int | None,
    segments: Array | None,
    scale: float | None,
    backend: Backend | None,
) -> AttentionSettings:
    """The checked settings."""
    require_heads("attention", q, k, v)
    head_dim = q.shape[3]
    if window is not None:
        if isinstance(window, bool) or not isinstance(window, int | np.integer):
            raise TypeError(f"window={window!r} must be a whole number of tokens, or None.")
        if window < 1 or not causal:
            raise ValueError(f"window={window} needs causal=True and at least one token.")
    if segments is not None:
        shape = jax.typeof(segments).shape
        if shape != q.shape[:2] or q.shape[1] != k.shape[1]:
            raise ValueError(
                f"segments {shape} must number the tokens of q {q.shape[:2]} and of k."
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
    if scale is None:
        scale = head_dim**-0.5
    else:
        require_number("scale", scale)
    return AttentionSettings(causal, window, float(scale), backend)


def require_heads(name: str, q: Array, k: Array, v: Array) -> None:
    """Raises unless the queries can attend to these keys and values."""
    for array in (q, k, v):
        require_real(name, array)
    fit = q.ndim == 4 and k.ndim == 4 and k.shape == v.shape
    fit = fit and (q.shape[0], q.shape[3]) == (k.shape[0], k.shape[3]) and q.shape[3] > 0
    if not fit or k.shape[2] < 1 or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{name} takes q [B, S, N, H] and k, v [B, T, K, H], where K divides N and H is not 0, "
            f"not {q.shape}, {k.shape} and {v.shape}."
        )


def _attention_of(
    settings: AttentionSettings, segments: Array | None, queries: int, keys: int
) -> Callable[..., Array]:
    """Attention between so many tokens, as a function of q, k and v that `_padded` has padded."""
    mask: Bool[Array, "B 1 S S"] | None = None
    lengths = {}
    if segments is not None:
        mask = (segments[:, :, None] == segments[:, None, :])[:, None]
    if settings.backend == "cudnn":
        if mask is not None and queries % 2:
            # The added token sees itself: the softmax of a row without any key would be NaN.
            mask = jnp.pad(mask, [(0, 0), (0, 0), (0, 1), (0, 1)]).at[..., -1, -1].set(True)
        elif keys % 2 and not (settings.causal and queries <= keys):
            # A mask would be read as a bias [B, N, S, T], which has a gradient of its own.
            lengths = {"query_seq_lengths": queries, "key_value_seq_lengths": keys}

    def attend(q: Array, k: Array, v: Array) -> Array:
        return dot_product_attention(
            q,
            k,
            v,
            mask=mask,
            scale=settings.scale,
            is_causal=settings.causal,
            local_window_size=None if settings.window is None else (settings.window - 1, 0),
            implementation=settings.backend,
            **{name: jnp.full(len(q), length, jnp.int32) for name, length in lengths.items()},
        )

    return attend


def _padded(settings: AttentionSettings, x: Float[Array, "B S N H"]) -> Array:
    """Adds a token to an odd length for cuDNN, which has no gradients there.

    The causal mask, that of segments or the lengths hide it from all tokens but itself.
    """
    odd = settings.backend == "cudnn" and x.shape[1] % 2
    return jnp.pad(x, [(0, 0), (0, 1), (0, 0), (0, 0)]) if odd else x


def dot_product_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    **settings: Any,
) -> Float[Array, "B S N H"]:
    """`jax.nn.dot_product_attention`; on a CPU, which lacks FP16 products, FP16 runs in FP32."""
    if q.dtype != jnp.float16 or jax.default_backend() != "cpu":
        return jax.nn.dot_product_attention(q, k, v, **settings)
    wide = (x.astype(jnp.float32) for x in (q, k, v))
    return jax.nn.dot_product_attention(*wide, **settings).astype(q.dtype)


def _pullback_indices(
    attend: Callable[..., Array], values: list[Array]
) -> tuple[int | None, int | None]:
    """The indices of o and the log-sum-exp among the leaves of cuDNN's pullback, None if absent."""

    def everything(*values: Array) -> list[Array]:
        o, pull = jax.vjp(attend, *values)
        return [o, *jax.tree.leaves(pull)]

    o, *leaves = jax.make_jaxpr(everything)(*values).jaxpr.outvars
    batch, length, heads, _ = values[0].shape
    shapes = [leaf.aval.shape for leaf in leaves]
    row = (batch, heads, length)
    return leaves.index(o) if o in leaves else None, shapes.index(row) if row in shapes else None


def _forward(
    mode: Mode,
    settings: AttentionSettings,
    qkv: Sequence[Array],
    segments: Array | None,
    layers: Layers | None,
) -> Any:
    dtype, precision = qkv[0].dtype, mode.precision
    block, fmt = precision.attention_block, precision.forward
    exact, stochastic = precision.exact_forward, precision.saves_stochastically
    inputs = tuple(
        # q and k are multiplied.
        save_array(x, fmt, block, stochastic=stochastic, antithetic=i == 1)
        for i, x in enumerate(qkv)
    )
    # cuDNN's backward pass recomputes the softmax from rounded scores and the log-sum-exp of exact
    # ones, so its rows add up to 1 only nearly. That costs less loss than an o of rounded values.
    pairs = zip(qkv, inputs, strict=True)
    values = [_padded(settings, restore(x if exact else of_x, dtype, block)) for x, of_x in pairs]
    queries, keys = (x.shape[1] for x in qkv[:2])
    attend = _attention_of(settings, segments, queries, keys)
    log_sum_exp = None
    if settings.backend == "cudnn":
        o, pull = jax.vjp(attend, *values)
        _, at = _pullback_indices(attend, values)
        log_sum_exp = None if at is None else jax.tree.leaves(pull)[at]
    else:
        o = attend(*values)
    o = o[:, :queries]
    output = save_array(o, fmt, block, stochastic=stochastic)
    in_blocks = partial(recording.blocks, BLOCKS, (*qkv, o), (*inputs, output), block, fmt)
    saved = inputs, output, log_sum_exp
    if layers is None:
        return o, (*saved, None, segments, None, ()), in_blocks
    used = join_heads(restore(o if exact else output, dtype, block))
    n = quantize_input(used, dtype, mode)
    scale = fp8_scale(n, mode)
    (y,), scales, _ = project(n, layers, dtype, mode)

    def record() -> Probe:
        products = recording.products("out/input", used, scale, layers, scales, mode)
        return products | in_blocks()

    return y, (*saved, scale, segments, layers, scales), record


def _backward(
    mode: Mode,
    settings: AttentionSettings,
    inputs: tuple[SavedArray, ...],
    output: SavedArray,
    log_sum_exp: Array | None,
    scale: Array | None,
    segments: Array | None,
    layers: Layers | None,
    scales: Scales,
    dy: Array,
) -> Any:
    block = mode.precision.attention_block
    values = [restore(x, dy.dtype, block) for x in inputs]
    o = restore(output, dy.dtype, block)
    lengths = [x.shape[1] for x in values]
    values = [_padded(settings, x) for x in values]
    attend = _attention_of(settings, segments, *lengths[:2])
    _, pull = jax.vjp(attend, *values)
    if log_sum_exp is not None:
        # The saved o and log-sum-exp replace those in the pullback. Nothing else then needs the
        # forward pass that this function traced, so XLA removes it.
        leaves, structure = jax.tree.flatten(pull)
        kept = _padded(settings, o), log_sum_exp
        for index, array in zip(_pullback_indices(attend, values), kept, strict=True):
            if index is not None:
                leaves[index] = array
        pull = jax.tree.unflatten(structure, leaves)

    def gradients(do: Array) -> tuple[Array, ...]:
        padded = pull(_padded(settings, do))
        return tuple(d[:, :length] for d, length in zip(padded, lengths, strict=True))

    if layers is None:
        return (gradients(dy), None, None), dict
    n = recompute_input(join_heads(o), scale, dy.dtype, mode)
    g = [gradient_operand(dy, mode)]
    do = input_gradient(layers, scales, g, o.dtype, mode).reshape(o.shape)
    d_layers = parameter_gradients(n, layers, g, lambda: (dy,))
    return (gradients(do), None, d_layers), lambda: recording.gradients((dy,), g, mode)


def _specs(
    settings: AttentionSettings, qkv: Sequence[Array], segments: Any, layers: Layers | None
) -> PartitionSpec:
    of_q = explicit_spec(qkv[0])
    columns = of_q[2:] if layers is None else explicit_spec(layers.weights[0])[1:]
    return merge_specs(*of_q[:2], *columns)


_define = partial(
    define_op, forward=_forward, backward=_backward, blocks=BLOCKS, size="attention_block"
)
_attention = _define("attention", specs=_specs)
_attention_linear = _define(
    "attention_linear", operands=("out/input",), weights=("out",), specs=_specs
)
