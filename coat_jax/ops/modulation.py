"""What conditions a layer on one vector for each sample, such as an embedding of its time.

    modulated_norm    y = norm(x) (1 + scale) + shift        saves x in FP8 blocks, or as it is
    gate              y = x g                                saves x for the gradient of g alike

Written in plain JAX, both would save their input in BF16, and the first norm(x), too.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from coat_jax.kernels.norm import (
    Norm,
    NormKind,
    Stats,
    normalize,
    normalize_backward,
    statistics,
)
from coat_jax.ops import recording
from coat_jax.ops.checks import require_real
from coat_jax.ops.definition import SavedArray, define_op, like_first, restore, save_inputs
from coat_jax.ops.projection import Mode
from coat_jax.precision import COAT, Precision, precision_of


def modulated_norm(
    x: Float[Array, "B S D"],
    scale: Float[Array, "B D"],
    shift: Float[Array, "B D"],
    *,
    kind: NormKind = "layer",
    epsilon: float = 1e-6,
    precision: Precision | str = COAT,
) -> Float[Array, "B S D"]:
    """A norm without parameters, scaled and shifted for each sample, in the dtype of `x`.

    Args:
        x: the input.
        scale: what is added to 1 and multiplied by, for each sample.
        shift: what is added, for each sample.
        kind: "layer" or "rms".
        epsilon: of the norm.
        precision: only its `block`, `forward`, `exact_forward` and `stochastic` matter here.
    """
    for one in (scale, shift):
        _require_by_sample("modulated_norm", x, one)
    mode = Mode(precision_of(precision), "xla")
    return _modulated_norm(mode, (kind, epsilon), x, scale, shift)


def gate(
    x: Float[Array, "B S D"], gate: Float[Array, "B D"], *, precision: Precision | str = COAT
) -> Float[Array, "B S D"]:
    """x times one number for each sample and column, in the dtype of `x`.

    Args:
        x: the input.
        gate: the factors.
        precision: see `modulated_norm`.
    """
    _require_by_sample("gate", x, gate)
    return _gate(Mode(precision_of(precision), "xla"), (), x, gate)


def _require_by_sample(name: str, x: Array, one: Array) -> None:
    require_real(name, x)
    require_real(name, one)
    if x.ndim != 3 or one.shape != (x.shape[0], x.shape[2]):
        raise ValueError(
            f"{name} takes [B, S, D] and one vector [B, D] for each sample, not {x.shape} and "
            f"{one.shape}."
        )


def _forward_norm(
    mode: Mode, kind: NormKind, epsilon: float, x: Array, scale: Array, shift: Array
) -> Any:
    norm = Norm(None, None, kind, epsilon)
    (saved,), (values,) = save_inputs((x,), mode.precision)
    stats = statistics(values, norm)
    y = normalize(values, stats, norm) * (1 + _by_token(scale)) + _by_token(shift)
    return y.astype(x.dtype), (saved, stats, scale), _record(mode, x, saved)


def _backward_norm(
    mode: Mode, kind: NormKind, epsilon: float, saved: SavedArray, stats: Stats, scale: Array,
    dy: Array,
) -> Any:  # fmt: skip
    norm, d = Norm(None, None, kind, epsilon), dy.astype(jnp.float32)
    values = restore(saved, jnp.float32, mode.precision.block)
    dx, _ = normalize_backward(values, stats, norm, d * (1 + _by_token(scale)))
    d_scale = jnp.sum(d * normalize(values, stats, norm), axis=1).astype(scale.dtype)
    d_shift = jnp.sum(d, axis=1).astype(scale.dtype)
    return (dx.astype(dy.dtype), d_scale, d_shift), dict


def _forward_gate(mode: Mode, x: Array, gate: Array) -> Any:
    (saved,), (values,) = save_inputs((x,), mode.precision)
    return (values * _by_token(gate)).astype(x.dtype), (saved, gate), _record(mode, x, saved)


def _backward_gate(mode: Mode, saved: SavedArray, gate: Array, dy: Array) -> Any:
    d = dy.astype(jnp.float32)
    d_gate = jnp.sum(d * restore(saved, jnp.float32, mode.precision.block), axis=1)
    return ((d * _by_token(gate)).astype(dy.dtype), d_gate.astype(gate.dtype)), dict


def _by_token(one: Float[Array, "B D"]) -> Float[Array, "B 1 D"]:
    return one.astype(jnp.float32)[:, None]


def _record(mode: Mode, x: Array, saved: SavedArray) -> Any:
    of_block = mode.precision.block, mode.precision.forward
    return partial(recording.blocks, ("saved",), (x,), (saved,), *of_block)


_define = partial(define_op, blocks=("saved",))
_modulated_norm = _define(
    "modulated_norm",
    _forward_norm,
    _backward_norm,
    specs=lambda kind, epsilon, x, *rest: like_first(x),
)
_gate = _define("gate", _forward_gate, _backward_gate, specs=like_first)
