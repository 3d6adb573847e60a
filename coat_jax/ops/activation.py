"""An activation by itself, for an MLP or experts whose linear layers are separate modules.

    y = act(gate) * up, or act(gate)        saves gate and up in FP8 blocks, or as they are

With `Precision.exact_forward` the forward pass computes with the original values, not with what is
saved.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from coat_jax.kernels.activation import Activation, Limited, activate_backward, require_activation
from coat_jax.kernels.activation import activate as activate_reference
from coat_jax.numerics.explicit_axes import explicit_spec, merge_specs
from coat_jax.ops import recording
from coat_jax.ops.checks import require_real
from coat_jax.ops.definition import SavedArray, define_op, restore, save_inputs
from coat_jax.ops.projection import Mode
from coat_jax.precision import COAT, Precision, precision_of

NAMES = ("gate/saved", "up/saved")


def activate(
    gate: Float[Array, "*rows F"],
    up: Float[Array, "*rows F"] | None = None,
    *,
    activation: Activation = "silu",
    limit: float | None = None,
    precision: Precision | str = COAT,
) -> Float[Array, "*rows F"]:
    """act(gate) * up, or act(gate) without `up`, in the dtype of `gate`.

    Args:
        gate: the input of the activation, of any leading shape.
        up: multiplies the activation; of the same shape and dtype.
        activation: see `coat_jax.kernels.activation`.
        limit: as in `gated_mlp`.
        precision: only its `block`, `forward`, `exact_forward` and `stochastic` matter here.
    """
    act, hidden = require_activation(activation, limit), (gate,) if up is None else (gate, up)
    for array in hidden:
        require_real("activate", array, least_rank=1)
    if up is not None and (gate.shape, gate.dtype) != (up.shape, up.dtype):
        raise ValueError(
            f"activate got gate {gate.dtype.name}{list(gate.shape)} and up "
            f"{up.dtype.name}{list(up.shape)}: they must have one shape and one dtype."
        )
    return _activate(Mode(precision_of(precision), "xla"), (act,), hidden)


def _specs(act: Limited, hidden: tuple[Array, ...]) -> PartitionSpec:
    pairs = zip(*map(explicit_spec, hidden), strict=True)
    return merge_specs(*(next(filter(None, pair), None) for pair in pairs))


def _forward(mode: Mode, act: Limited, hidden: tuple[Array, ...]) -> Any:
    precision = mode.precision
    saved, values = save_inputs(hidden, precision)
    of_block = precision.block, precision.forward
    record = partial(recording.blocks, NAMES[: len(hidden)], hidden, saved, *of_block)
    return activate_reference(values, act).astype(hidden[0].dtype), (saved,), record


def _backward(mode: Mode, act: Limited, saved: tuple[SavedArray, ...], dy: Array) -> Any:
    values = [restore(h, jnp.float32, mode.precision.block) for h in saved]
    gradients = activate_backward(values, dy, act)
    return (tuple(d.astype(dy.dtype) for d in gradients),), dict


_activate = define_op("activate", _forward, _backward, blocks=NAMES, specs=_specs)
