"""Any optax transformation as a whole step: in place, and with BF16 parameters rounded in one way.

    optimizer = in_place(fp8_adamw(1e-3))
    params, state = optimizer.step(params, grads, state, grad_scale=scale, skip=not_finite)

If parameters and state are donated, they are not copied. `fp8_adamw` has a step of its own, in one
pass over memory. Any other transformation gets those of 16 bits in FP32, so the moments of BF16
parameters are in FP32 (or in FP8, with `compress`). XLA fuses the casts. `with_rounding` computes
the same as a transformation, for optax's own loop.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int32

from coat_jax.kernels.adam import Number
from coat_jax.optax.adam_state import ScaleByFP8AdamState
from coat_jax.optax.arguments import require_step_arguments
from coat_jax.optax.rounding import (
    CorrectedState,
    RoundParams,
    is_bf16,
    join_params,
    round_stepped,
    zero_corrections,
)
from coat_jax.optax.states.sharding import leaves_some_out, optimized
from coat_jax.optax.trees import GRADIENTS, explaining_states, in_fp32, require_floats, require_like
from coat_jax.validation import Seed, require

_log = logging.getLogger("coat_jax")


class InPlaceOptimizer(NamedTuple):
    """`init(params) -> state` and `step(params, grads, state) -> (params, state)`.

    The step also takes, by name, `grad_scale`, which multiplies the gradients, and `skip`: if true,
    nothing changes, bit for bit and still in place. (A conditional around the step would copy
    parameters and state.)
    """

    init: Callable[[optax.Params], Any]
    step: Callable[..., tuple[optax.Params, Any]]


class FusedTransformation(optax.GradientTransformationExtraArgs):
    """A transformation with a step in one pass, which `in_place` returns instead of its own."""

    fused: Callable[[RoundParams], InPlaceOptimizer]


class InPlaceState(NamedTuple):
    """The number of steps that were not skipped, and the state of the transformation."""

    count: Int32[Array, ""]  # type: ignore[assignment]
    inner: Any


def in_place(
    tx: optax.GradientTransformation, *, round_params: RoundParams = "nearest", seed: int = 0
) -> InPlaceOptimizer:
    """Makes an optax transformation a step that updates parameters and state in place.

    `in_place(fp8_adamw(..))` computes the step in one pass over memory. Its state is a
    `ScaleByFP8AdamState`, that of the first transformation in `fp8_adamw`. A chain that contains
    `fp8_adamw` is not computed in one pass: instead of clipping in a chain, pass `grad_scale`.

    Args:
        tx: any optax transformation whose state keeps its structure and dtypes.
        round_params: how BF16 parameters are rounded. "nearest" loses updates smaller than half a
            unit in the last place; "stochastic" preserves them on average. With "24_bits"
            parameters train as numbers of 24 bits, the last of them rounded stochastically: the
            state is a `CorrectedState`, with 8 bits for each.
        seed: of that rounding; for `fp8_adamw`, that of its `Storage` instead.

    Returns:
        `init` and `step`. `step` passes other keyword arguments to `tx.update`, such as the `value`
        of `optax.contrib.reduce_on_plateau`.

    Example:
        >>> import coat_jax as coat, jax, jax.numpy as jnp
        >>> params = {"w": jnp.ones((256, 256))}
        >>> optimizer = coat.optax.in_place(coat.optax.fp8_adamw(1e-3, b2=0.95, weight_decay=0.1))
        >>> state = optimizer.init(params)
        >>> step = jax.jit(optimizer.step, donate_argnums=(0, 2))
        >>> params, state = step(params, {"w": jnp.ones((256, 256))}, state)
        >>> print(params["w"][0, 0])
        0.9989
    """
    if isinstance(tx, FusedTransformation):
        return tx.fused(round_params)
    init_state, compute = _rounded(tx, round_params, seed)

    def init(params: optax.Params) -> Any:
        state = init_state(params)
        nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, ScaleByFP8AdamState))
        has_adam = any(isinstance(node, ScaleByFP8AdamState) for node in nodes)
        if has_adam and not leaves_some_out(state):
            _log.warning(
                "in_place computes a transformation around fp8_adamw in several passes. For one "
                "pass use in_place(fp8_adamw(..)), and clip by the step's grad_scale."
            )
        return state

    def step(
        params: optax.Params,
        grads: optax.Updates,
        state: Any,
        *,
        grad_scale: Number = 1.0,
        skip: bool | Array = False,
        **extra_args: Any,
    ) -> tuple[optax.Params, Any]:
        require_step_arguments(grad_scale, skip)
        new, after, _ = compute(params, grads, state, grad_scale, extra_args)
        if skip is False:
            return new, after
        # A conditional would copy both.
        return jax.tree.map(partial(jnp.where, skip), (params, state), (new, after))

    return InPlaceOptimizer(init, step)


def with_rounding(
    tx: optax.GradientTransformation, round_params: RoundParams, *, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """Makes `optax.apply_updates` round BF16 parameters as `in_place` does.

    The state is that of `in_place`, and `tx` gets parameters and gradients in FP32. The update of a
    BF16 parameter becomes the difference, in FP32, between the new and the old one, which
    `optax.apply_updates` must get unchanged: make this the outermost transformation. Updates of
    other parameters are those of `tx`.

    Args:
        tx: any optax transformation, such as a chain.
        round_params: see `in_place`.
        seed: of the rounding.

    Example:
        >>> import coat_jax as coat, jax.numpy as jnp, optax
        >>> params = {"w": jnp.ones((256, 256), jnp.bfloat16)}
        >>> tx = coat.optax.with_rounding(optax.sgd(2.0**-12), "24_bits")
        >>> state = tx.init(params)
        >>> for _ in range(100):
        ...     updates, state = tx.update({"w": jnp.ones((256, 256))}, state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> print(params["w"][0, 0], coat.optax.corrected_params(params, state)["w"][0, 0])
        0.976562 0.97558594
    """
    init, compute = _rounded(tx, round_params, seed)

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, Any]:
        if params is None:
            raise ValueError(
                "with_rounding needs the parameters: call tx.update(updates, state, params)."
            )
        new, state, updates = compute(params, updates, state, 1.0, extra_args)

        def difference(old: Any, new: Any, update: Any) -> Any:
            return in_fp32(new) - in_fp32(old) if is_bf16(old) else update

        return jax.tree.map(difference, params, new, updates), state

    return optax.GradientTransformationExtraArgs(init, update)


def _rounded(
    tx: optax.GradientTransformation, round_params: RoundParams, seed: int
) -> tuple[Callable[[optax.Params], Any], Callable[..., tuple[optax.Params, Any, optax.Updates]]]:
    """The initial state; and a step: new parameters and state, and the updates of `tx`."""
    require("round_params", round_params, RoundParams)
    require("seed", seed, Seed)
    inner_tx = optax.with_extra_args_support(tx)

    def init(params: optax.Params) -> InPlaceState | CorrectedState:
        # Some transformations begin with Python numbers; a step turns them into arrays.
        inner = jax.tree.map(
            lambda leaf: leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf),
            inner_tx.init(in_fp32(params)),
        )
        _require_steppable(params, inner)
        state = InPlaceState(jnp.zeros([], jnp.int32), inner)
        if round_params != "24_bits":
            return state
        return CorrectedState(state, zero_corrections(params))

    def step(
        params: optax.Params, grads: optax.Updates, state: Any, grad_scale: Number, extra_args: Any
    ) -> tuple[optax.Params, Any, optax.Updates]:
        with explaining_states(init, state, params):
            before, joined, corrections = state, params, None
            if round_params == "24_bits":
                before, corrections = state.inner, state.corrections
                joined = join_params(params, corrections)
            require_like("gradients", grads, optimized(params), GRADIENTS, dtypes=False)
            _require_steppable(grads, before.inner)
            wide = in_fp32(joined)
            scaled = jax.tree.map(
                # A factor may be in FP64.
                lambda g: jnp.asarray(g * grad_scale, jnp.result_type(g)),
                in_fp32(grads),
            )
            updates, inner = inner_tx.update(scaled, before.inner, wide, **extra_args)
        require_like("state", inner, before.inner, "The transformation changed its own state.")
        count = optax.safe_increment(before.count)
        stepped = optax.apply_updates(wide, updates)
        new, corrections = round_stepped(
            stepped, params, corrections, how=round_params, seed=seed, step=count
        )
        after = InPlaceState(count, inner)
        return new, after if corrections is None else CorrectedState(after, corrections), updates

    return init, step


def _require_steppable(tree: Any, state: Any) -> None:
    """Raises for parameters or gradients that the transformation with this state cannot step.

    Complex arrays are stepped without a cast. Integers are allowed if the state masks some leaves.
    """
    masked = [jnp.integer] if leaves_some_out(state) else []
    require_floats(tree, jnp.complexfloating, *masked)
