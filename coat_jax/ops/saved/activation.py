"""The activation between two linear layers: what it saves, and how the backward pass recomputes it.

    forward     hidden -> saved hidden (blocks), scale -> a = act(saved hidden) in FP8, straight
    backward    saved hidden, scale, da -> a in FP8, transposed; the gradients of hidden in FP8

Hidden is (gate, up) or (up,). With `Precision.exact_forward` the forward pass computes a from the
original hidden, not from what is saved. Each function is `jnp`, or a kernel if `mode.fused_block`
is set and the activation has one.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from coat_jax.kernels import gemm
from coat_jax.kernels.activation import (
    Activation,
    activate,
    activate_backward,
    activation_backward,
    activation_cast,
    activation_forward,
    activation_forward_exact,
    activation_rescale,
    gradient_bounds,
    has_kernel,
)
from coat_jax.kernels.gemm import Operand
from coat_jax.numerics.blocks import Blocks
from coat_jax.ops.saved.array import SavedArray, restore, save_hidden
from coat_jax.ops.saved.projection import Mode, gradient_operand, recompute_input


class SavedActivation(NamedTuple):
    """The inputs of an activation as they are saved."""

    hidden: tuple[SavedArray, ...]
    scale: Float[Array, ""] | None  # of a in FP8; None if a is not rounded


def save_activation(
    hidden: Sequence[Float[Array, "B S F"]], act: Activation, mode: Mode
) -> tuple[SavedActivation, Operand]:
    """Returns what is saved of `hidden`, and its activation a as the operand of a product."""
    precision, dtype = mode.precision, hidden[0].dtype
    size, stochastic = _fused_block(act, mode), precision.saves_stochastically
    if size is not None and precision.exact_forward:
        blocks, codes, maxima = activation_forward_exact(
            hidden, act, precision.forward, size, stochastic=stochastic
        )
        scale = gemm.tensor_scale(jnp.max(maxima, initial=0.0), precision.forward)
        codes = activation_rescale(codes, maxima, scale, size)
        return SavedActivation(blocks, scale), Operand(codes, None, scale)
    if size is not None:
        blocks, maxima = activation_forward(
            hidden, act, precision.forward, size, stochastic=stochastic
        )
        scale = gemm.tensor_scale(jnp.max(maxima, initial=0.0), precision.forward)
        codes = activation_cast(blocks, act, scale, size)
        return SavedActivation(blocks, scale), Operand(codes, None, scale)
    saved, values = save_hidden(hidden, precision)
    a = activate(values, act)
    if mode.format is None:
        return SavedActivation(saved, None), Operand(a.astype(dtype), None, None)
    if precision.block is None or not precision.exact_forward:
        operand = gemm.operand(a, mode.format, "straight", mode.implementation)
        return SavedActivation(saved, operand.scale), operand
    # The scale must also fit the activation that the backward pass recomputes.
    again = activate(_values(saved, mode), act)
    largest = gemm.largest_magnitude(jnp.maximum(jnp.abs(a), jnp.abs(again)))
    scale = gemm.tensor_scale(largest, mode.format)
    operand = gemm.scaled(a, scale, mode.format, "straight", mode.implementation)
    return SavedActivation(saved, scale), operand


def activation_gradients(
    saved: SavedActivation,
    da: Float[Array, "B S F"],
    da_bound: Float[Array, "B S"] | None,
    act: Activation,
    mode: Mode,
) -> tuple[Operand, list[Operand]]:
    """The recomputed activation and the gradients of hidden, as operands of products.

    Args:
        saved: from `save_activation`.
        da: the gradient of the activation.
        da_bound: an upper bound of the magnitudes in each row of da, if one is known.
        act: the activation.
        mode: how to compute.
    """
    hidden, scale = saved
    size = _fused_block(act, mode)
    if size is not None and scale is not None:
        blocks, dtype = _blocks(hidden), mode.precision.backward
        scales = [gemm.tensor_scale(m, dtype) for m in _magnitudes(saved, da, da_bound, act, mode)]
        stochastic = mode.precision.stochastic_backward
        again, codes = activation_backward(
            blocks, da, act, scale, scales, size, dtype, stochastic=stochastic
        )
        gradients = [Operand(*pair, s) for pair, s in zip(codes, scales, strict=True)]
        return Operand(None, again, scale), gradients
    a = activate(_values(hidden, mode), act)
    values = gradient_values(saved, da, act, mode)
    if mode.format is None:
        values = tuple(d.astype(da.dtype) for d in values)
    gradients = [gradient_operand(d, mode) for d in values]
    return recompute_input(a, scale, da.dtype, mode), gradients


def _magnitudes(
    saved: SavedActivation,
    da: Float[Array, "B S F"],
    da_bound: Float[Array, "B S"] | None,
    act: Activation,
    mode: Mode,
) -> tuple[Float[Array, ""], ...]:
    """The magnitudes that set the scales of the gradients of hidden: bounds, or the largest."""
    if da_bound is not None:
        return gradient_bounds(_blocks(saved.hidden), da_bound, act)
    return tuple(gemm.largest_magnitude(d) for d in gradient_values(saved, da, act, mode))


def gradient_values(
    saved: SavedActivation, da: Float[Array, "B S F"], act: Activation, mode: Mode
) -> tuple[Float[Array, "B S F"], ...]:
    """The gradients of hidden in FP32, from which the gradients of biases are computed."""
    return activate_backward(_values(saved.hidden, mode), da, act)


def _fused_block(act: Activation, mode: Mode) -> int | None:
    """The block size of the fused kernels; None if they do not compute this activation."""
    return mode.fused_block if has_kernel(act) else None


def _values(hidden: Sequence[SavedArray], mode: Mode) -> list[Float[Array, "B S F"]]:
    return [restore(h, jnp.float32, mode.precision.block) for h in hidden]


def _blocks(hidden: Sequence[SavedArray]) -> list[Blocks]:
    return [h for h in hidden if isinstance(h, Blocks)]
