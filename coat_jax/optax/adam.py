"""AdamW whose moments are stored in 8 bits each.

    m = b1 m + (1 - b1) g            stored as m / sqrt(v), an integer of 8 bits
    v = b2 v + (1 - b2) g^2          stored as a logarithm of 8 bits, rounded stochastically
    u = m_hat / (sqrt(v_hat + eps_root) + eps)

`coat_jax.storage` gives the reasons, and also has the FP8 formats of the COAT paper.

`scale_by_fp8_adam` computes u; `fp8_adamw` chains it with weight decay and the learning rate,
with the argument names and defaults of `optax.adamw`. The state is 2.08 bytes per parameter
instead of 8. Arithmetic is in FP32 whatever the dtypes; updates have the dtype to which gradients
and parameters promote, as in optax.

`in_place(fp8_adamw(..))` does in one pass over memory what the chain and `optax.apply_updates` do.
Through XLA and in FP32, the results are those of the chain, bit for bit; with FP32 parameters and
BF16 gradients they may differ by FP32's rounding. With both in BF16, the chain also rounds the
updates between its transformations to BF16; the fused step does not. The roots and powers of the
Triton kernel are approximate, with a relative error of 2^-22.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import optax
from jaxtyping import Array

from coat_jax.kernels.adam import Hyper, Number, Settings
from coat_jax.kernels.dispatch import Implementation
from coat_jax.optax.adam_state import ScaleByFP8AdamState, init_state, step_tree
from coat_jax.optax.arguments import (
    refuse_mu_dtype,
    require_b2_for_b1,
    require_numbers,
    require_step_arguments,
)
from coat_jax.optax.in_place import FusedTransformation, InPlaceOptimizer
from coat_jax.optax.rounding import CorrectedState, RoundParams, zero_corrections
from coat_jax.optax.trees import (
    GRADIENTS,
    OTHER_STATE,
    require_floats,
    require_like,
    update_dtypes,
)
from coat_jax.storage import Storage
from coat_jax.validation import require

# A tree of booleans, one for each parameter or for all of a subtree; or a function to one.
Mask = Any | Callable[[optax.Params], Any]


def scale_by_fp8_adam(
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
    mu_dtype: None = None,
    *,
    nesterov: bool = False,
    storage: Storage | None = None,
    implementation: Implementation | None = None,
) -> optax.GradientTransformation:
    """Rescales updates as Adam does, with both moments stored in 8 bits.

    `fp8_adamw`, which chains it with weight decay and the learning rate, describes the arguments.
    """
    hyper = Hyper(b1=b1, b2=b2, eps=eps, eps_root=eps_root)
    require_numbers(b1=b1, b2=b2, eps=eps, eps_root=eps_root)
    require("storage", storage, Storage | None)
    refuse_mu_dtype(mu_dtype)
    settings = Settings(storage or Storage(), nesterov)

    def init(params: optax.Params) -> ScaleByFP8AdamState:
        require_b2_for_b1(b1, b2, settings.storage, params)
        return init_state(params, settings.storage)

    def update(
        updates: optax.Updates, state: ScaleByFP8AdamState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ScaleByFP8AdamState]:
        wanted = jax.eval_shape(partial(init_state, storage=settings.storage), updates)
        require_like("state", state, wanted, OTHER_STATE)
        directions, state, _ = step_tree(
            None,
            updates,
            state,
            hyper,
            settings,
            dtypes=update_dtypes(updates, params),
            implementation=implementation,
        )
        return directions, state

    return optax.GradientTransformation(init, update)


def fp8_adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
    mu_dtype: None = None,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: Mask | None = None,
    *,
    nesterov: bool = False,
    storage: Storage | None = None,
    implementation: Implementation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """AdamW with both moments stored in 8 bits; takes the arguments of `optax.adamw`.

    Args:
        learning_rate: a number or a schedule.
        b1: decay rate of the first moment.
        b2: decay rate of the second moment.
        eps: added to the root of the second moment.
        eps_root: added inside the root.
        mu_dtype: must be None; keeps the argument order of optax.
        weight_decay: a number or a schedule; decoupled from the gradient, multiplied by the
            learning rate.
        mask: a tree of booleans, or a function from parameters to one: which leaves decay.
        nesterov: whether to use Nesterov momentum, in optax's form.
        storage: formats, group size, rounding and which leaves stay in FP32.
        implementation: None, "xla" or "triton"; see `coat_jax.kernels.dispatch`.

    Example:
        >>> import coat_jax as coat, jax.numpy as jnp, optax
        >>> params = {"w": jnp.ones((256, 256))}
        >>> tx = coat.optax.fp8_adamw(1e-3, b2=0.95, weight_decay=0.1)
        >>> state = tx.init(params)
        >>> updates, state = tx.update({"w": jnp.ones((256, 256))}, state, params)
        >>> state[0].mu.codes["w"].dtype.name
        'int8'
    """
    hyper = Hyper(learning_rate, b1, b2, eps, eps_root, weight_decay)
    require_numbers(learning_rate=learning_rate, weight_decay=weight_decay)
    first = scale_by_fp8_adam(
        b1,
        b2,
        eps,
        eps_root,
        mu_dtype,
        nesterov=nesterov,
        storage=storage,
        implementation=implementation,
    )
    chain = optax.chain(
        first,
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )
    tx = FusedTransformation(chain.init, chain.update)
    settings = Settings(storage or Storage(), nesterov)
    tx.fused = partial(_fused, first.init, hyper, mask, settings, implementation)
    return tx


def _fused(
    init_moments: Callable[[optax.Params], Any],
    hyper: Hyper,
    mask: Mask | None,
    settings: Settings,
    implementation: Implementation | None,
    round_params: RoundParams,
) -> InPlaceOptimizer:
    """The step of `in_place(fp8_adamw(..))`."""
    require("round_params", round_params, RoundParams)
    corrects = round_params == "24_bits"
    settings = dataclasses.replace(settings, round_params=round_params != "nearest")

    def init(params: optax.Params) -> ScaleByFP8AdamState | CorrectedState:
        state = init_moments(params)
        return CorrectedState(state, zero_corrections(params)) if corrects else state

    def step(
        params: optax.Params,
        grads: optax.Updates,
        state: Any,
        *,
        grad_scale: Number = 1.0,
        skip: bool | Array = False,
    ) -> tuple[optax.Params, Any]:
        require_like("state", state, jax.eval_shape(init, params), OTHER_STATE)
        require_floats(grads)
        require_like("gradients", grads, params, GRADIENTS, dtypes=False)
        require_step_arguments(grad_scale, skip)
        adam = state.inner if corrects else state
        learning_rate, weight_decay = (
            rate(adam.count) if callable(rate) else rate
            for rate in (hyper.learning_rate, hyper.weight_decay)
        )
        now = hyper._replace(
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            grad_scale=grad_scale,
            skip=skip,
        )
        decayed = None
        if mask is not None:
            # A module that can be called is a tree, as in optax.
            is_function = callable(mask) and jax.tree_util.all_leaves([mask])
            flags = jax.tree.broadcast(mask(params) if is_function else mask, params)
            decayed = [bool(flag) for flag in jax.tree.leaves(flags)]
        new, adam, corrections = step_tree(
            params,
            grads,
            adam,
            now,
            settings,
            decayed=decayed,
            corrections=state.corrections if corrects else None,
            implementation=implementation,
        )
        return new, CorrectedState(adam, corrections) if corrects else adam

    return InPlaceOptimizer(init, step)
