"""The activation between two linear layers: from their outputs to the next product, and back.

    forward     hidden -> kept (blocks), scale -> a = act(kept) in FP8, straight
    backward    kept, scale, da -> a in FP8, transposed; the gradients of hidden in FP8

Hidden is (gate, up) or (up,). With `Precision.exact_forward` the forward pass takes hidden itself
in the place of what was kept. Each function is jnp, or a kernel where `mode.fused_block`.
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
    gradient_bounds,
)
from coat_jax.kernels.activation_exact import activation_forward_exact, activation_rescale
from coat_jax.kernels.activation_fused import (
    activation_backward,
    activation_cast,
    activation_forward,
)
from coat_jax.kernels.gemm import Operand
from coat_jax.numerics.blocks import Blocks
from coat_jax.ops.saved.array import Kept, keep_rows, restore
from coat_jax.ops.saved.projection import Mode, gradient_operand, operand_again


class Activated(NamedTuple):
    """What is kept of an activation's inputs."""

    hidden: tuple[Kept, ...]
    scale: Float[Array, ""] | None  # of the product's operand, where that is FP8


def activated(
    hidden: Sequence[Float[Array, "B S F"]], act: Activation, mode: Mode
) -> tuple[Activated, Operand]:
    """What to keep of `hidden`, and its activation as a product takes it."""
    precision, dtype = mode.precision, hidden[0].dtype
    size = mode.fused_block
    if size is not None and precision.exact_forward:
        blocks, codes, maxima = activation_forward_exact(hidden, act, precision.forward, size)
        scale = gemm.tensor_scale(jnp.max(maxima), precision.forward)
        codes = activation_rescale(codes, maxima, scale, size)
        return Activated(blocks, scale), Operand(codes, None, scale)
    if size is not None:
        blocks, maxima = activation_forward(hidden, act, precision.forward, size)
        scale = gemm.tensor_scale(jnp.max(maxima), precision.forward)
        codes = activation_cast(blocks, act, scale, size)
        return Activated(blocks, scale), Operand(codes, None, scale)
    kept, values = zip(*(keep_rows(h, precision) for h in hidden), strict=True)
    a = activate(values, act)
    if mode.format is None:
        return Activated(kept, None), Operand(a.astype(dtype), None, None)
    if precision.block is None or not precision.exact_forward:
        operand = gemm.operand(a, mode.format, "straight", mode.implementation)
        return Activated(kept, operand.scale), operand
    # The scale serves both passes: it fits what the backward pass recomputes, too.
    again = activate(_values(kept, mode), act)
    largest = gemm.largest_magnitude(jnp.maximum(jnp.abs(a), jnp.abs(again)))
    scale = gemm.tensor_scale(largest, mode.format)
    operand = gemm.scaled(a, scale, mode.format, "straight", mode.implementation)
    return Activated(kept, scale), operand


def activated_backward(
    result: Activated,
    da: Float[Array, "B S F"],
    da_bound: Float[Array, "B S"] | None,
    act: Activation,
    mode: Mode,
) -> tuple[Operand, list[Operand]]:
    """The activation again and the gradients of hidden, as the products take them.

    Args:
        result: what was kept.
        da: the gradient of the activation.
        da_bound: what no magnitude in each of its rows exceeds, if that is known.
        act: the activation.
        mode: how to compute.
    """
    hidden, scale = result
    size = mode.fused_block
    if size is not None and scale is not None:
        blocks, dtype = _blocks(hidden), mode.precision.backward
        scales = [gemm.tensor_scale(m, dtype) for m in _magnitudes(result, da, da_bound, act, mode)]
        again, codes = activation_backward(blocks, da, act, scale, scales, size, dtype)
        gradients = [Operand(*pair, s) for pair, s in zip(codes, scales, strict=True)]
        return Operand(None, again, scale), gradients
    a = activate(_values(hidden, mode), act)
    values = gradient_values(result, da, act, mode)
    if mode.format is None:
        values = tuple(d.astype(da.dtype) for d in values)
    gradients = [gradient_operand(d, mode) for d in values]
    return operand_again(a, scale, da.dtype, mode, "transposed"), gradients


def _magnitudes(
    result: Activated,
    da: Float[Array, "B S F"],
    da_bound: Float[Array, "B S"] | None,
    act: Activation,
    mode: Mode,
) -> tuple[Float[Array, ""], ...]:
    """What scales the gradients of hidden: bounds of them, or the largest."""
    if da_bound is not None:
        return gradient_bounds(_blocks(result.hidden), da_bound, act)
    return tuple(gemm.largest_magnitude(d) for d in gradient_values(result, da, act, mode))


def gradient_values(
    result: Activated, da: Float[Array, "B S F"], act: Activation, mode: Mode
) -> tuple[Float[Array, "B S F"], ...]:
    """The gradients of hidden in FP32, as biases need them."""
    return activate_backward(_values(result.hidden, mode), da, act)


def _values(hidden: Sequence[Kept], mode: Mode) -> list[Float[Array, "B S F"]]:
    return [restore(h, jnp.float32, mode.precision.block) for h in hidden]


def _blocks(hidden: Sequence[Kept]) -> list[Blocks]:
    return [h for h in hidden if isinstance(h, Blocks)]
