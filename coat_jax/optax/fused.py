"""The whole AdamW step at once: gradients in, parameters and moments of 8 bits updated in place.

    params, state = optimizer.step(params, grads, state, grad_scale=scale)

does in one pass over memory what  optax.chain(scale by grad_scale, fp8_adamw)  and
`optax.apply_updates` do. If you donate `params` and `state` to the jitted function that calls it,
the step allocates no memory.

Through XLA and in FP32, the results are those of the chain, bit for bit; with FP32 parameters and
BF16 gradients they may differ by FP32's rounding. With both in BF16, the chain also rounds the
updates between its transformations to BF16; the fused step does not. The roots and powers of the
Triton kernel are approximate, with a relative error of 2^-22. With `correct_params`, BF16
parameters are stepped as numbers of 24 bits, and the state has one more byte for each.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, Protocol

import jax
import optax
from jaxtyping import Array

from coat_jax.errors import UserError
from coat_jax.kernels.adam import Hyper, Number, Settings
from coat_jax.kernels.dispatch import Implementation
from coat_jax.optax.adam_state import ScaleByFP8AdamState, init_state, require_state, step_tree
from coat_jax.optax.checks.arguments import (
    require_b2_for_b1,
    require_flag,
    require_hyper,
    require_scalar,
    require_settings,
    value_at,
)
from coat_jax.optax.checks.trees import described
from coat_jax.optax.corrections import CorrectedState, init_corrections, require_corrections
from coat_jax.optax.masks import Mask, mask_of, require_mask
from coat_jax.storage import Storage


class Step(Protocol):
    """The signature of `InPlaceOptimizer.step`."""

    def __call__(
        self,
        params: optax.Params,
        grads: optax.Updates,
        state: Any,
        *,
        grad_scale: Number = 1.0,
        skip: bool | Array = False,
    ) -> tuple[optax.Params, Any]:
        """Returns new parameters and state, or the old ones.

        Args:
            params: the parameters.
            grads: their gradients.
            state: from `init` or from the step before.
            grad_scale: multiplies the gradients.
            skip: if true, nothing changes, bit for bit and still in place. A conditional around
                the step would copy parameters and state.
        """
        ...


class InPlaceOptimizer(NamedTuple):
    """`init(params) -> state` and `step(params, grads, state) -> (params, state)`."""

    init: Callable[[optax.Params], Any]
    step: Step

    def __getattr__(self, name: str) -> NoReturn:
        """Explains, where `update` is looked for, why this is not an optax transformation."""
        advice = (
            "Its step(params, grads, state) is a whole step by itself, which clips by grad_scale. "
            "Where an optax transformation is required, as in optax.chain or nnx.Optimizer, use "
            "fp8_adamw instead of fused_fp8_adamw, and tx instead of in_place(tx)."
        )
        known = f"{type(self).__name__!r} object has no attribute {name!r}."
        raise AttributeError(f"{known} {advice}" if name == "update" else known)


def require_step(name: str, optimizer: Any) -> None:
    """Raises unless the argument of the function `name` is a `InPlaceOptimizer`."""
    if not isinstance(optimizer, InPlaceOptimizer):
        raise UserError(
            f"{name} takes an optimizer with a step of its own, not {described(optimizer)}. Make "
            "one with fused_fp8_adamw(..), or with in_place(..) from a transformation of optax."
        )


def fused_fp8_adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
    *,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: Mask | None = None,
    nesterov: bool = False,
    round_params: bool = False,
    correct_params: bool = False,
    storage: Storage | None = None,
    implementation: Implementation | None = None,
) -> InPlaceOptimizer:
    """AdamW with both moments stored in 8 bits, as one in-place step.

    The other arguments are those of `fp8_adamw`, without `mu_dtype`. From `weight_decay` on they
    are passed by name. The state is that of the first transformation in `fp8_adamw`, or with
    `correct_params` a `CorrectedState` around it.

    Args:
        round_params: whether BF16 parameters are rounded stochastically, so that updates
            smaller than half a unit in the last place are not lost.
        correct_params: whether BF16 parameters train as numbers of 24 bits. The state is then a
            `CorrectedState`, with 8 bits for each. `round_params` rounds the last of the 24 bits.

    Example:
        >>> import coat_jax as coat, jax, jax.numpy as jnp
        >>> params = {"w": jnp.ones((256, 256))}
        >>> optimizer = coat.optax.fused_fp8_adamw(1e-3, b2=0.95, weight_decay=0.1)
        >>> state = optimizer.init(params)
        >>> step = jax.jit(optimizer.step, donate_argnums=(0, 2))
        >>> params, state = step(params, {"w": jnp.ones((256, 256))}, state)
        >>> print(params["w"][0, 0])
        0.9989
    """
    hyper = Hyper(learning_rate, b1, b2, eps, eps_root, weight_decay)
    require_hyper(hyper)
    require_settings(
        storage=storage,
        implementation=implementation,
        nesterov=nesterov,
        round_params=round_params,
        correct_params=correct_params,
    )
    require_mask("mask", mask)
    settings = Settings(storage or Storage(), nesterov, round_params)

    def init(params: optax.Params) -> ScaleByFP8AdamState | CorrectedState:
        require_b2_for_b1(hyper, settings.storage, params)
        state = init_state(params, settings.storage)
        return CorrectedState(state, init_corrections(params)) if correct_params else state

    def step(
        params: optax.Params,
        grads: optax.Updates,
        state: Any,
        *,
        grad_scale: Number = 1.0,
        skip: bool | Array = False,
    ) -> tuple[optax.Params, Any]:
        if params is None:
            raise ValueError("The step needs the parameters: call step(params, grads, state).")
        if correct_params:
            require_corrections(params, state)
        adam = state.inner if correct_params else state
        require_state(adam, settings.storage)
        require_scalar("grad_scale", grad_scale)
        require_flag("skip", skip)
        now = hyper._replace(
            learning_rate=value_at("learning_rate", learning_rate, adam.count),
            weight_decay=value_at("weight_decay", weight_decay, adam.count),
            grad_scale=grad_scale,
            skip=skip,
        )
        flags = None if mask is None else jax.tree.leaves(mask_of("mask", mask, params))
        new, adam, corrections = step_tree(
            params,
            grads,
            adam,
            now,
            settings,
            decayed=flags and list(map(bool, flags)),
            corrections=state.corrections if correct_params else None,
            implementation=implementation,
        )
        return new, CorrectedState(adam, corrections) if correct_params else adam

    return InPlaceOptimizer(init, step)
