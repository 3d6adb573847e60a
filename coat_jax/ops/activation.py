"""An activation by itself, for a gated MLP or experts whose linear layers are separate modules.

y = act(gate) * up, or act(gate)         saves gate and up in FP8 blocks, or as they are
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from coat_jax import probes
from coat_jax.kernels.activation import (
    Activation,
    activate_backward,
    require_activation,
)
from coat_jax.kernels.activation import activate as activate_reference
from coat_jax.numerics.explicit_axes import explicit_spec, merge_specs, shard_inside
from coat_jax.ops import recording
from coat_jax.ops.backward import define_op
from coat_jax.ops.checks import require_columns
from coat_jax.ops.saved.array import SavedArray, restore, save_hidden
from coat_jax.precision import COAT, Precision, precision_of
from coat_jax.probes import Probe

NAMES = ("gate", "up")


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
    precision = precision_of(precision)
    blocks = () if precision.block is None else tuple(f"{n}/saved" for n in NAMES[: len(hidden)])
    op = partial(_activate, (precision, activation))
    probe = probes.probe("activate", blocks)

    def result() -> PartitionSpec:
        pairs = zip(*map(explicit_spec, hidden), strict=True)
        return merge_specs(*(next(filter(None, pair), None) for pair in pairs))

    return shard_inside(op, result, hidden, probe)


def _forward(settings: tuple[Precision, Activation], hidden: tuple[Array, ...]) -> Any:
    precision, act = settings
    saved, values = save_hidden(hidden, precision)

    def record(probe: Probe) -> Probe:
        for name, x, blocks in zip(NAMES, hidden, saved, strict=False):
            probe = recording.saved(
                probe, f"{name}/saved", x, blocks, precision.block, precision.forward
            )
        return probe

    return activate_reference(values, act).astype(hidden[0].dtype), (saved,), record


def _backward(
    settings: tuple[Precision, Activation], saved: tuple[SavedArray, ...], dy: Array
) -> Any:
    precision, act = settings
    values = [restore(h, jnp.float32, precision.block) for h in saved]
    gradients = activate_backward(values, dy, act)
    return (tuple(d.astype(dy.dtype) for d in gradients),), lambda probe: probe


_activate = define_op(
    "activate", _forward, _backward, rounds=lambda settings: settings[0].block is not None
)
