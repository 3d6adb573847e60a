"""How BF16 parameters are rounded after a step that is computed in FP32.

    "nearest"      an update smaller than 1/512 of its parameter is lost
    "stochastic"   up or down at random, right on average
    "24_bits"      8 more bits of each parameter are in the state; their last is rounded at random

With 24 bits a step takes  p, c -> numbers of 24 bits in FP32 -> a step of any optimizer -> p, c.
The correction c is one byte per BF16 parameter (`coat_jax.numerics.corrections`). The model
computes with p, the nearest BF16 numbers. Parameters of other dtypes need no corrections, and
have a placeholder of a few bytes.

The random numbers are hashed from seed, step, leaf and index (`coat_jax.numerics.noise`): the same
run gives the same parameters, on any mesh.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array

from coat_jax.numerics import corrections, noise
from coat_jax.numerics.expansion import GROUP_SIZE
from coat_jax.optax.states.host_memory import on_device
from coat_jax.optax.states.sharding import fit_metadata, full
from coat_jax.optax.trees import OTHER_STATE, require_like
from coat_jax.storage import placeholder_shape

RoundParams = Literal["nearest", "stochastic", "24_bits"]


class CorrectedState(NamedTuple):
    """The state of an optimizer with `round_params="24_bits"`.

    Attributes:
        inner: the state that the optimizer would have without corrections.
        corrections: int8 arrays in a tree like the parameters'. They belong to the parameters that
            the same step returned: if you replace a parameter, set its corrections to zero.
    """

    inner: Any
    corrections: Any


def corrected_params(params: optax.Params, state: Any) -> optax.Params:
    """The parameters with their corrections: those in BF16 become FP32 numbers of 24 bits.

    Args:
        params: the parameters.
        state: of the optimizer, or of a chain or wrapper with the optimizer in it. What is in host
            memory is copied to the device.
    """
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, CorrectedState))
    states = [node for node in nodes if isinstance(node, CorrectedState)]
    if len(states) != 1:
        raise ValueError(
            f"The state contains {len(states)} CorrectedStates, and must contain one. Optimizers "
            'with round_params="24_bits" have one.'
        )
    return join_params(params, on_device(states[0].corrections))


def is_bf16(param: Any) -> bool:
    """Whether a parameter is rounded as `round_params` says."""
    return bool(jnp.result_type(param) == jnp.bfloat16)


def zero_corrections(params: optax.Params) -> Any:
    """Corrections of zero, sharded like the parameters."""

    def leaf(p: Any) -> Array:
        shape = jnp.shape(p)
        return full(p, shape if is_bf16(p) else placeholder_shape(shape), corrections.DTYPE)

    return fit_metadata(jax.tree.map(leaf, params), params)


def join_params(params: optax.Params, corrections_of: Any) -> optax.Params:
    """The parameters with those in BF16 joined with their corrections, as FP32 numbers.

    Raises ValueError for the corrections of other parameters.
    """
    wanted = jax.eval_shape(zero_corrections, params)
    require_like("state.corrections", corrections_of, wanted, OTHER_STATE)
    leaves, structure = jax.tree.flatten(params)
    joined = [
        corrections.join(p, c) if is_bf16(p) else p
        for p, c in zip(leaves, jax.tree.leaves(corrections_of), strict=True)
    ]
    return jax.tree.unflatten(structure, joined)


def round_stepped(
    stepped: optax.Params,
    params: optax.Params,
    corrections_of: Any = None,
    *,
    how: RoundParams,
    seed: int,
    step: ArrayLike,
) -> tuple[optax.Params, Any]:
    """New parameters in their own dtypes, and new corrections.

    `stepped` are the new parameters, with those in 16 bits as FP32 numbers; `params`, and for
    "24_bits" `corrections_of`, are the old ones. `seed` and `step` seed the rounding.
    """
    leaves, structure = jax.tree.flatten(params)
    bytes_of, structure_of_bytes = jax.tree.flatten(corrections_of)
    for i, (p, new, number) in enumerate(
        zip(leaves, jax.tree.leaves(stepped), noise.leaf_ids(params), strict=True)
    ):
        if how == "nearest" or not is_bf16(p):
            leaves[i] = new.astype(jnp.result_type(p))
            continue
        key = noise.param_key(noise.leaf_key(seed, step, number, p, new))
        if how == "stochastic":
            leaves[i] = noise.round_to_bfloat16(new, key, run=GROUP_SIZE)
        else:
            dither = noise.bits(key, new.shape, run=GROUP_SIZE) >> 8
            leaves[i], bytes_of[i] = corrections.split(new, dither)
    new_corrections = jax.tree.unflatten(structure_of_bytes, bytes_of)
    return jax.tree.unflatten(structure, leaves), new_corrections
