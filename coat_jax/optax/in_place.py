"""Any optax transformation as a step in place, with the interface of `fused_fp8_adamw`.

    optimizer = in_place(compress(optax.lion(1e-4)))
    params, state = optimizer.step(params, grads, state, grad_scale=scale, skip=not_finite)

The transformation gets parameters and gradients in FP32, whatever their dtypes, so the moments of
BF16 parameters are in FP32 (or in FP8, with `compress`). XLA fuses the casts. If parameters and
state are donated, they are not copied.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int32

from coat_jax.kernels.adam import Number
from coat_jax.optax.checks.arguments import (
    require_flag,
    require_scalar,
    require_seed,
    require_settings,
)
from coat_jax.optax.checks.trees import (
    dtype_of,
    explaining_states,
    require_real_float,
    require_same_shapes,
    require_state_of,
    require_transformation,
)
from coat_jax.optax.corrections import (
    CorrectedState,
    advice_on,
    init_corrections,
    join_params,
    require_corrections,
    split_params,
)
from coat_jax.optax.dtypes import in_fp32
from coat_jax.optax.fused import InPlaceOptimizer
from coat_jax.optax.masks import leaves_some_out
from coat_jax.optax.rounding import apply_updates
from coat_jax.optax.states.following import optimized


class InPlaceState(NamedTuple):
    """The number of steps that were not skipped, and the state of the transformation."""

    count: Int32[Array, ""]  # type: ignore[assignment]
    inner: Any


def in_place(
    tx: optax.GradientTransformation,
    *,
    round_params: bool = False,
    correct_params: bool = False,
    seed: int = 0,
) -> InPlaceOptimizer:
    """Makes an optax transformation a step that updates parameters and state in place.

    Args:
        tx: any optax transformation whose state keeps its structure and dtypes.
        round_params: whether BF16 parameters are rounded stochastically, so that updates
            smaller than half a unit in the last place are not lost.
        correct_params: whether BF16 parameters train as numbers of 24 bits. The state is then a
            `CorrectedState`, with 8 bits for each. `round_params` rounds the last of the 24 bits.
        seed: of that rounding.

    Returns:
        `init` and `step`. `step` passes other keyword arguments to `tx.update`, such as the `value`
        of `optax.contrib.reduce_on_plateau`.

    Example:
        >>> import coat_jax as coat, jax, jax.numpy as jnp, optax
        >>> params = {"w": jnp.ones((256, 256))}
        >>> optimizer = coat.optax.in_place(coat.optax.compress(optax.lion(1e-3)))
        >>> state = optimizer.init(params)
        >>> step = jax.jit(optimizer.step, donate_argnums=(0, 2))
        >>> params, state = step(params, {"w": jnp.ones((256, 256))}, state)
        >>> print(f"{params['w'][0, 0]:.3f}")
        0.999
    """
    require_settings(storage=None, round_params=round_params, correct_params=correct_params)
    require_seed(seed)
    inner_tx = optax.with_extra_args_support(require_transformation("in_place", tx))

    def init(params: optax.Params) -> InPlaceState | CorrectedState:
        # The first state of some transformations has Python numbers; a step turns them into arrays.
        state = jax.tree.map(
            lambda leaf: leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf),
            inner_tx.init(in_fp32(params)),
        )
        _require_steppable(params, state)
        state = InPlaceState(jnp.zeros([], jnp.int32), state)
        return CorrectedState(state, init_corrections(params)) if correct_params else state

    def step(
        params: optax.Params,
        grads: optax.Updates,
        state: Any,
        *,
        grad_scale: Number = 1.0,
        skip: bool | Array = False,
        **extra_args: Any,
    ) -> tuple[optax.Params, Any]:
        if correct_params:
            require_corrections(params, state)
        before = state.inner if correct_params else state
        require_state_of(InPlaceState, before, advice_on(before))
        require_scalar("grad_scale", grad_scale)
        require_flag("skip", skip)
        require_same_shapes("gradients", grads, optimized(params))
        _require_steppable(grads, before.inner)
        scaled = jax.tree.map(
            lambda g: jnp.asarray(g * grad_scale, dtype_of(g)),  # a factor may be in FP64
            in_fp32(grads),
        )
        wide = join_params(params, state) if correct_params else params
        in_full = in_fp32(wide)
        with explaining_states(inner_tx, before.inner, in_full):
            updates, inner = inner_tx.update(scaled, before.inner, in_full, **extra_args)
            _require_unchanged(before.inner, inner)
        count = optax.safe_increment(before.count)
        new = InPlaceState(count, inner)
        after: tuple[optax.Params, Any]
        if correct_params:
            step_of_rounding = count if round_params else None
            stepped = optax.apply_updates(wide, updates)
            after = split_params(stepped, params, state, new, seed=seed, step=step_of_rounding)
        elif round_params:
            after = apply_updates(params, updates, step=count, seed=seed), new
        else:
            after = optax.apply_updates(params, updates), new
        if skip is False:
            return after
        return _select(skip, (params, state), after)

    return InPlaceOptimizer(init, step)


def _require_steppable(tree: Any, state: Any) -> None:
    """Raises for parameters or gradients that the transformation with this state cannot step.

    Complex arrays are stepped without a cast. Integers are allowed if the state masks some leaves.
    """
    stepped: tuple[Any, ...] = (jnp.complexfloating,)
    if leaves_some_out(state):
        stepped += (jnp.integer,)
    for path, leaf in jax.tree.leaves_with_path(tree):
        if not any(jnp.issubdtype(dtype_of(leaf), kind) for kind in stepped):
            require_real_float(jax.tree_util.keystr(path) or "the parameter", leaf)


def _select(skip: bool | Array, before: Any, after: Any) -> Any:
    """`before` where `skip` is true, otherwise `after`. A conditional would copy both."""
    return jax.tree.map(lambda old, new: jnp.where(skip, old, new), before, after)


def _require_unchanged(before: Any, after: Any) -> None:
    """Raises unless the new state has the same structure, shapes and dtypes as the old one."""
    was: Any = jax.tree.structure(before)
    if was != jax.tree.structure(after):
        raise ValueError(
            f"The transformation changed the structure of its state, from {was} to "
            f"{jax.tree.structure(after)}. A step in place needs a state that keeps its structure."
        )
    pairs = zip(jax.tree.leaves_with_path(before), jax.tree.leaves(after), strict=True)
    for (path, old), new in pairs:
        if (jnp.shape(old), old.dtype) != (jnp.shape(new), jnp.asarray(new).dtype):
            raise ValueError(
                f"The transformation changed state{jax.tree_util.keystr(path)} from {old.dtype}"
                f"{list(jnp.shape(old))} to {jnp.asarray(new).dtype}{list(jnp.shape(new))}. A step "
                "in place needs a state that keeps its shapes and dtypes."
            )
