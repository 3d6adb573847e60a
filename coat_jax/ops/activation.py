"""An activation: by itself, and between two linear layers of an MLP, which is one op.

    activate                y = act(gate) * up, or act(gate): for an MLP or experts whose linear
                            layers are separate modules

    save_activation         hidden -> saved hidden (blocks), scale -> a = act(hidden) in FP8 or INT8
    activation_gradients    saved hidden, scale, da -> a in FP8, transposed; the gradients of hidden
                            in FP8

Hidden is (gate, up) or (up,). It is saved in FP8 blocks, or as it is. With
`Precision.exact_forward` the forward pass computes a from the original hidden, not from what is
saved. The last two functions are `jnp`, or a kernel if `mode.fused_block` is set and the activation
has one.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from coat_jax.kernels import gemm, int8
from coat_jax.kernels.activation import (
    HAVE_KERNELS,
    Activation,
    activate_backward,
    activation_backward,
    activation_cast,
    activation_forward,
    activation_rescale,
    gradient_bounds,
    require_activation,
)
from coat_jax.kernels.activation import activate as activate_reference
from coat_jax.kernels.gemm import Operand
from coat_jax.numerics.blocks import Blocks
from coat_jax.numerics.explicit_axes import explicit_spec, merge_specs
from coat_jax.ops import recording
from coat_jax.ops.checks import require_columns
from coat_jax.ops.definition import SavedArray, define_op, restore, save_inputs
from coat_jax.ops.projection import Input, Mode, Products, gradient_operand, recompute_input
from coat_jax.precision import COAT, Precision, precision_of

NAMES = ("gate/saved", "up/saved")


def activate(
    gate: Float[Array, "*rows F"],
    up: Float[Array, "*rows F"] | None = None,
    *,
    activation: Activation = "silu",
    precision: Precision | str = COAT,
) -> Float[Array, "*rows F"]:
    """act(gate) * up, or act(gate) without `up`, in the dtype of `gate`.

    Args:
        gate: the input of the activation, of any leading shape.
        up: multiplies the activation; of the same shape and dtype.
        activation: see `coat_jax.kernels.activation`.
        precision: only its `block`, `forward`, `exact_forward` and `stochastic` matter here.
    """
    require_activation(activation)
    hidden = (gate,) if up is None else (gate, up)
    for array in hidden:
        require_columns("activate", array)
    if up is not None and (gate.shape, gate.dtype) != (up.shape, up.dtype):
        raise ValueError(
            f"activate got gate {gate.dtype.name}{list(gate.shape)} and up "
            f"{up.dtype.name}{list(up.shape)}: they must have one shape and one dtype."
        )
    return _activate(Mode(precision_of(precision), "xla"), (activation,), hidden)


def _specs(act: Activation, hidden: tuple[Array, ...]) -> PartitionSpec:
    pairs = zip(*map(explicit_spec, hidden), strict=True)
    return merge_specs(*(next(filter(None, pair), None) for pair in pairs))


def _forward(mode: Mode, act: Activation, hidden: tuple[Array, ...]) -> Any:
    precision = mode.precision
    saved, values = save_inputs(hidden, precision)
    of_block = precision.block, precision.forward
    record = partial(recording.blocks, NAMES[: len(hidden)], hidden, saved, *of_block)
    return activate_reference(values, act).astype(hidden[0].dtype), (saved,), record


def _backward(mode: Mode, act: Activation, saved: tuple[SavedArray, ...], dy: Array) -> Any:
    gradients = activate_backward(_values(saved, mode), dy, act)
    return (tuple(d.astype(dy.dtype) for d in gradients),), dict


_activate = define_op("activate", _forward, _backward, blocks=NAMES, specs=_specs)


class SavedActivation(NamedTuple):
    """The inputs of an activation as they are saved."""

    hidden: tuple[SavedArray, ...]
    scale: Float[Array, ""] | None  # of a in FP8; None if a is not rounded


def save_activation(
    hidden: Sequence[Float[Array, "B S F"]],
    act: Activation,
    mode: Mode,
    *,
    unscaled: Products = (),
) -> tuple[SavedActivation, Input]:
    """Returns what is saved of `hidden`, and its activation a as the input of a product.

    Args:
        hidden: (gate, up) or (up,).
        act: the activation.
        mode: how to compute.
        unscaled: the products that `hidden` comes from, if it has no biases: a kernel then scales
            INT8 products itself, which saves a pass over them.
    """
    precision, dtype = mode.precision, hidden[0].dtype
    size = mode.fused_block if act in HAVE_KERNELS else None
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
            in_int8=precision.int8_forward,
        )
        scale = gemm.tensor_scale(jnp.max(maxima, initial=0.0), precision.forward)
        if codes is None:
            codes = activation_cast(blocks, act, scale, size)
        elif precision.int8_forward:
            of_rows = jnp.max(maxima, axis=-1, initial=0.0)
            rescaled = int8.RowCodes(activation_rescale(codes, maxima, of_rows, size), of_rows)
            return SavedActivation(blocks, scale), rescaled
        else:
            codes = activation_rescale(codes, maxima, scale, size)
        return SavedActivation(blocks, scale), Operand(codes, None, scale)
    saved, values = save_inputs(hidden, precision)
    a = activate_reference(values, act)
    if mode.format is None:
        return SavedActivation(saved, None), Operand(a.astype(dtype), None, None)
    magnitudes = jnp.abs(a)
    if precision.block is not None and precision.exact_forward:
        # The scale must also fit the activation that the backward pass recomputes.
        magnitudes = jnp.maximum(magnitudes, jnp.abs(activate_reference(_values(saved, mode), act)))
    scale = gemm.tensor_scale(gemm.largest_magnitude(magnitudes), mode.format)
    if mode.precision.int8_forward:
        return SavedActivation(saved, scale), int8.round_rows(a)
    n = gemm.operand(a, mode.format, "straight", mode.implementation, scale=scale)
    return SavedActivation(saved, scale), n


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
    size = mode.fused_block if act in HAVE_KERNELS else None
    if size is not None and scale is not None:
        blocks, dtype = [h for h in hidden if isinstance(h, Blocks)], mode.precision.backward
        if da_bound is None:
            values = gradient_values(saved, da, act, mode)
            magnitudes = tuple(gemm.largest_magnitude(d) for d in values)
        else:
            magnitudes = gradient_bounds(blocks, da_bound, act)
        scales = [gemm.tensor_scale(m, dtype) for m in magnitudes]
        stochastic = mode.precision.stochastic_backward
        recomputed, codes = activation_backward(
            blocks, da, act, scale, scales, size, dtype, stochastic=stochastic
        )
        gradients = [Operand(*pair, s) for pair, s in zip(codes, scales, strict=True)]
        return Operand(None, recomputed, scale), gradients
    a = activate_reference(_values(hidden, mode), act)
    values = gradient_values(saved, da, act, mode)
    if mode.format is None:
        values = tuple(d.astype(da.dtype) for d in values)
    gradients = [gradient_operand(d, mode) for d in values]
    return recompute_input(a, scale, da.dtype, mode), gradients


def gradient_values(
    saved: SavedActivation, da: Float[Array, "B S F"], act: Activation, mode: Mode
) -> tuple[Float[Array, "B S F"], ...]:
    """The gradients of hidden in FP32, from which the gradients of biases are computed."""
    return activate_backward(_values(saved.hidden, mode), da, act)


def _values(hidden: Sequence[SavedArray], mode: Mode) -> list[Float[Array, "B S F"]]:
    return [restore(h, jnp.float32, mode.precision.block) for h in hidden]
