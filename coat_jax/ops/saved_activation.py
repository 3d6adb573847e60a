"""The activation of an MLP: what is saved of its inputs, and the gradients computed from that.

    hidden = (gate, up)     a = act(gate) * up
    hidden = (up,)          a = act(up)

Saved are the elements of `hidden`, in FP8 blocks or as they are, and the scale of a in FP8. The
backward pass recomputes a. Both passes are `jnp`, or kernels if `mode.fused_block` is set and the
activation has kernels.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from coat_jax.kernels import gemm, int8
from coat_jax.kernels.activation import (
    HAVE_KERNELS,
    Limited,
    activate,
    activate_backward,
    activation_backward,
    activation_cast,
    activation_forward,
    activation_rescale,
    gradient_bounds,
)
from coat_jax.kernels.gemm import Operand
from coat_jax.numerics.blocks import Blocks
from coat_jax.ops.definition import SavedArray, restore, save_inputs
from coat_jax.ops.projection import (
    Input,
    Mode,
    Products,
    Unrounded,
    gradient_operand,
    recompute_input,
)


class SavedActivation(NamedTuple):
    """The inputs of an activation as they are saved."""

    hidden: tuple[SavedArray, ...]
    scale: Float[Array, ""] | None  # of a in FP8; None if a is not rounded

    def decoded(self, mode: Mode) -> list[Float[Array, "B S F"]]:
        """The inputs in FP32."""
        return [restore(h, jnp.float32, mode.precision.block) for h in self.hidden]

    def gradients(
        self, da: Float[Array, "B S F"], act: Limited, mode: Mode
    ) -> tuple[Float[Array, "B S F"], ...]:
        """The gradients of the inputs in FP32."""
        return activate_backward(self.decoded(mode), da, act)


def save_activation(
    hidden: Sequence[Float[Array, "B S F"]],
    act: Limited,
    mode: Mode,
    *,
    unscaled: Products = (),
    axes: tuple[str, ...] = (),
) -> tuple[SavedActivation, Input]:
    """Returns what is saved of `hidden`, and its activation a as the input of a product.

    Args:
        hidden: (gate, up) or (up,).
        act: the activation.
        mode: how to compute.
        unscaled: the products that `hidden` comes from, if it has no biases: a kernel then scales
            INT8 products itself, which saves a pass over them.
        axes: see `gemm.tensor_scale`.
    """
    precision, dtype = mode.precision, hidden[0].dtype
    size = mode.fused_block if act.name in HAVE_KERNELS else None
    stochastic = precision.saves_stochastically
    if size is not None:
        products = [p for p in unscaled if isinstance(p, int8.Product)]
        blocks, codes, maxima = activation_forward(
            products or hidden,
            act,
            precision.forward,
            size,
            exact=precision.exact_forward,
            stochastic=stochastic,
            products=precision.forward_products,
        )
        scale = gemm.tensor_scale(jnp.max(maxima, initial=0.0), precision.forward, axes)
        used: Input
        if codes is None:
            used = Operand(activation_cast(blocks, act, scale, size), None, scale)
        elif precision.forward_products == "int8":
            of_rows = jnp.max(maxima, axis=-1, initial=0.0)
            used = int8.RowCodes(activation_rescale(codes, maxima, of_rows, size), of_rows)
        elif precision.forward_products == "bf16":
            used = Unrounded(codes, scale)
        else:
            used = Operand(activation_rescale(codes, maxima, scale, size), None, scale)
        return SavedActivation(blocks, scale), used
    of_hidden, values = save_inputs(hidden, precision)
    saved, a = SavedActivation(of_hidden, None), activate(values, act)
    if mode.format is None:
        return saved, Operand(a.astype(dtype), None, None)
    magnitudes = jnp.abs(a)
    if precision.block is not None and precision.exact_forward:
        # The scale must also fit the activation that the backward pass recomputes.
        magnitudes = jnp.maximum(magnitudes, jnp.abs(activate(saved.decoded(mode), act)))
    scale = gemm.tensor_scale(gemm.largest_magnitude(magnitudes), mode.format, axes)
    if precision.forward_products == "int8":
        used = int8.round_rows(a)
    elif precision.forward_products == "bf16":
        used = Unrounded(a.astype(dtype), scale)
    else:
        used = gemm.operand(a, mode.format, "straight", mode.implementation, scale=scale)
    return saved._replace(scale=scale), used


def activation_gradients(
    saved: SavedActivation,
    da: Float[Array, "B S F"],
    da_bound: Float[Array, "B S"] | None,
    act: Limited,
    mode: Mode,
) -> tuple[Operand, list[Operand]]:
    """The recomputed activation and the gradients of its inputs, as operands of products.

    Args:
        saved: from `save_activation`.
        da: the gradient of the activation.
        da_bound: an upper bound of the magnitudes in each row of da, if one is known.
        act: the activation.
        mode: how to compute.
    """
    size = mode.fused_block if act.name in HAVE_KERNELS else None
    if size is not None and saved.scale is not None:
        blocks, dtype = [h for h in saved.hidden if isinstance(h, Blocks)], mode.precision.backward
        if da_bound is None:
            magnitudes = tuple(map(gemm.largest_magnitude, saved.gradients(da, act, mode)))
        else:
            magnitudes = gradient_bounds(blocks, da_bound, act)
        scales = [gemm.tensor_scale(m, dtype) for m in magnitudes]
        stochastic = mode.precision.stochastic_backward
        recomputed, codes, _ = activation_backward(
            blocks, da, act, saved.scale, scales, size, dtype, stochastic=stochastic
        )
        operands = [Operand(*pair, s) for pair, s in zip(codes, scales, strict=True)]
        return Operand(None, recomputed, saved.scale), operands
    a, gradients = activate(saved.decoded(mode), act), saved.gradients(da, act, mode)
    if mode.format is None:
        gradients = tuple(d.astype(da.dtype) for d in gradients)
    operands = [gradient_operand(d, mode) for d in gradients]
    return recompute_input(a, saved.scale, da.dtype, mode), operands


def weighted_activation_gradients(
    saved: SavedActivation,
    weighted_scale: Float[Array, ""] | None,
    da: Float[Array, "1 R F"],
    weights: Float[Array, " R"],
    bound: Float[Array, " R"] | None,
    act: Limited,
    mode: Mode,
    axes: tuple[str, ...],
) -> tuple[Operand, list[Operand], Float[Array, " R"]]:
    """As `activation_gradients`, if each row of the activation is multiplied by a weight.

    Returns the weighted activation, the gradients of its inputs with one scale for all, and the
    gradients of the weights.

    Args:
        saved: from `save_activation`.
        weighted_scale: of the weighted activation.
        da: the gradient of the activation for weights of one.
        weights: of the rows.
        bound: an upper bound of the magnitudes in each row of da times its weight, if one is known.
        act: the activation.
        mode: how to compute.
        axes: see `gemm.tensor_scale`.
    """
    size = mode.fused_block if act.name in HAVE_KERNELS else None
    dtype = mode.precision.backward

    def gradients() -> tuple[Array, ...]:
        return saved.gradients(da.astype(jnp.float32) * weights[:, None], act, mode)

    if size is not None and weighted_scale is not None:
        blocks = [h for h in saved.hidden if isinstance(h, Blocks)]
        if bound is None:
            magnitudes = tuple(map(gemm.largest_magnitude, gradients()))
        else:
            magnitudes = gradient_bounds(blocks, bound[None], act)
        of_all = gemm.tensor_scale(jnp.maximum(*magnitudes), dtype, axes)
        columns, codes, dots = activation_backward(
            blocks,
            da,
            act,
            weighted_scale,
            (of_all, of_all),
            size,
            dtype,
            weights=weights[None],
            stochastic=mode.precision.stochastic_backward,
        )
        assert dots is not None
        operands = [Operand(*pair, of_all) for pair in codes]
        return Operand(None, columns, weighted_scale), operands, dots[0]
    a = activate(saved.decoded(mode), act)
    dots = jnp.sum(da.astype(jnp.float32) * a, axis=-1)[0]
    d_values = gradients()
    shared: Array | None = None
    if mode.format is None:
        d_values = tuple(d.astype(da.dtype) for d in d_values)
    else:
        largest = jnp.maximum(*map(gemm.largest_magnitude, d_values))
        shared = gemm.tensor_scale(largest, dtype, axes)
    operands = [gradient_operand(d, mode, scale=shared) for d in d_values]
    weighted = recompute_input(a * weights[:, None], weighted_scale, da.dtype, mode)
    return weighted, operands, dots
