"""BF16 parameters that train as numbers of 24 bits, 8 of which are in the optimizer's state.

    p, c  ->  24-bit numbers in FP32  ->  a step of any optimizer  ->  p, c

The correction c is one byte per BF16 parameter (`coat_jax.numerics.corrections`). The model
computes with p, the nearest BF16 numbers, as it would with FP32 parameters that it casts to BF16.
Parameters of other dtypes need no corrections, and have a placeholder of a few bytes.

`fused_fp8_adamw` and `in_place` do this with `correct_params=True`, and `with_corrections` does it
for any optax transformation.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array

from coat_jax.numerics import corrections, noise
from coat_jax.numerics.expansion import GROUP_SIZE
from coat_jax.optax.checks.trees import (
    explaining_states,
    require_real_floats,
    require_same_shapes,
    require_same_structure,
    require_state_of,
    require_transformation,
)
from coat_jax.optax.dtypes import in_fp32
from coat_jax.optax.states.following import optimized
from coat_jax.optax.states.host_memory import on_device
from coat_jax.optax.states.metadata import fit_metadata
from coat_jax.optax.states.sharding import full
from coat_jax.storage import placeholder_shape


class CorrectedState(NamedTuple):
    """The state of an optimizer that corrects BF16 parameters.

    Attributes:
        inner: the state that the optimizer would have without corrections.
        corrections: int8 arrays in a tree like the parameters'. They belong to the parameters that
            the same step returned: if you replace a parameter, set its corrections to zero.
    """

    inner: Any
    corrections: Any


def with_corrections(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Makes an optax transformation train BF16 parameters as numbers of 24 bits.

    The transformation gets parameters and gradients in FP32, so its moments are in FP32, too. Make
    this the outermost transformation: `optax.apply_updates` must get its updates unchanged.

    Args:
        tx: any optax transformation, such as a chain.

    Example:
        >>> import coat_jax as coat, jax.numpy as jnp, optax
        >>> params = {"w": jnp.ones((256, 256), jnp.bfloat16)}
        >>> tx = coat.optax.with_corrections(optax.sgd(2.0**-12))
        >>> state = tx.init(params)
        >>> for _ in range(100):
        ...     updates, state = tx.update({"w": jnp.ones((256, 256))}, state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> print(params["w"][0, 0], coat.optax.corrected_params(params, state)["w"][0, 0])
        0.976562 0.97558594
    """
    inner = optax.with_extra_args_support(require_transformation("with_corrections", tx))

    def init(params: optax.Params) -> CorrectedState:
        require_real_floats(params)
        return CorrectedState(inner.init(in_fp32(params)), init_corrections(params))

    def update(
        updates: optax.Updates,
        state: CorrectedState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, CorrectedState]:
        if params is None:
            raise ValueError(
                "with_corrections needs the parameters: call tx.update(updates, state, params)."
            )
        require_corrections(params, state)
        require_same_shapes("updates", updates, optimized(params))
        wide = join_params(params, state)
        with explaining_states(inner, state.inner, wide):
            updates, after = inner.update(in_fp32(updates), state.inner, wide, **extra_args)
        new, state = split_params(optax.apply_updates(wide, updates), params, state, after)

        def difference(old: Any, new: Any, update: Any) -> Any:
            return in_fp32(new) - in_fp32(old) if is_corrected(old) else update

        return jax.tree.map(difference, params, new, updates), state

    return optax.GradientTransformationExtraArgs(init, update)


def corrected_params(params: optax.Params, state: Any) -> optax.Params:
    """The parameters with their corrections: those in BF16 become FP32 numbers of 24 bits.

    Args:
        params: the parameters.
        state: of the optimizer, or of a chain or wrapper with the optimizer in it. What is in host
            memory is copied to the device.
    """
    nodes = jax.tree.leaves(state, is_leaf=_is_corrected_state)
    states = [node for node in nodes if _is_corrected_state(node)]
    if len(states) != 1:
        raise ValueError(
            f"The state contains {len(states)} CorrectedStates, and must contain one. Optimizers "
            "with correct_params=True have one, and so has with_corrections."
        )
    require_corrections(params, states[0])
    return join_params(params, states[0]._replace(corrections=on_device(states[0].corrections)))


def is_corrected(param: Any) -> bool:
    """Whether a parameter has corrections."""
    return bool(jnp.result_type(param) == jnp.bfloat16)


def init_corrections(params: optax.Params) -> Any:
    """Corrections of zero for every BF16 parameter, sharded like the parameter."""

    def leaf(p: Any) -> Array:
        return full(p, _shape(p), corrections.DTYPE)

    return fit_metadata(jax.tree.map(leaf, params), params)


def join_params(params: optax.Params, state: CorrectedState) -> optax.Params:
    """The parameters that an optimizer steps: those with corrections as FP32 numbers."""
    leaves, structure = jax.tree.flatten(params)
    wide = [
        corrections.join(p, c) if is_corrected(p) else p
        for p, c in zip(leaves, jax.tree.leaves(state.corrections), strict=True)
    ]
    return jax.tree.unflatten(structure, wide)


def split_params(
    stepped: optax.Params,
    params: optax.Params,
    state: CorrectedState,
    inner: Any,
    *,
    seed: int = 0,
    step: ArrayLike | None = None,
) -> tuple[optax.Params, CorrectedState]:
    """New parameters in their own dtypes, and the new state: the inverse of `join_params`.

    Args:
        stepped: the new parameters; those with corrections in FP32.
        params: the old parameters.
        state: the old state.
        inner: the new state without corrections.
        seed: of the rounding to 24 bits.
        step: the number of this step, which seeds stochastic rounding; None rounds to nearest.
    """
    leaves, structure = jax.tree.flatten(params)
    corrected, structure_of_corrections = jax.tree.flatten(state.corrections)
    for i, (leaf_id, p) in enumerate(
        zip(noise.leaf_ids(params), jax.tree.leaves(stepped), strict=True)
    ):
        if is_corrected(leaves[i]):
            dither = None
            if step is not None:
                key = noise.distinguish(noise.leaf_key(seed, step, leaf_id), leaves[i], p)
                dither = noise.bits(noise.param_key(key), p.shape, run=GROUP_SIZE) >> 8
            leaves[i], corrected[i] = corrections.split(p, dither)
        else:
            leaves[i] = p.astype(jnp.result_type(leaves[i]))
    new = jax.tree.unflatten(structure_of_corrections, corrected)
    return jax.tree.unflatten(structure, leaves), CorrectedState(inner, new)


def advice_on(state: Any) -> str:
    """What to do about a state that an optimizer without corrections does not accept."""
    if _is_corrected_state(state):
        return "It has corrections of BF16 parameters: step it with correct_params=True."
    return "Make it with init(params)."


def require_corrections(params: optax.Params, state: Any) -> None:
    """Raises unless `state` has corrections of these parameters."""
    require_state_of(CorrectedState, state)
    require_same_structure("parameters", params, state.corrections)
    for (path, p), c in zip(
        jax.tree.leaves_with_path(params), jax.tree.leaves(state.corrections), strict=True
    ):
        if (c.shape, c.dtype) != (_shape(p), corrections.DTYPE):
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} is {jnp.result_type(p).name}"
                f"{list(jnp.shape(p))}, but its correction in the state is {c.dtype.name}"
                f"{list(c.shape)}: it was made for a parameter of another shape or dtype. Make the "
                "state with init(params) from these parameters."
            )


def _shape(param: Any) -> tuple[int, ...]:
    """The shape of a parameter's corrections, or of the placeholder for them."""
    shape = jnp.shape(param)
    return shape if is_corrected(param) else placeholder_shape(shape)


def _is_corrected_state(node: Any) -> bool:
    return isinstance(node, CorrectedState)
