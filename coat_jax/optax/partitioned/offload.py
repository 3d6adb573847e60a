"""An optimizer whose state is in the memory of the host, and is stepped on the device in parts.

    state of a part -> device           while the previous part is copied to the host
    params, state = optimizer.step(params, gradients, state)          of the part
    state of the part -> host           while the next part is copied to the device

Only arrays as large as their parameters are moved: moments or their codes, and corrections. The
scales of codes are small, and stay on the device. The device holds two parts at a time.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from coat_jax.errors import UserError
from coat_jax.kernels.adam import Number
from coat_jax.optax.in_place import InPlaceOptimizer
from coat_jax.optax.partitioned.parts import Parts
from coat_jax.optax.states.host_memory import HOST, host_sharding, is_on_host
from coat_jax.optax.states.sharding import followed_indices
from coat_jax.optax.trees import GRADIENTS, require_like

SMALL = 2**16  # bytes of an array that is not worth a copy
PART = 2**27  # the fewest bytes of a part: copies of many arrays start at once


def in_host_memory(optimizer: InPlaceOptimizer) -> InPlaceOptimizer:
    """Keeps the large arrays of an optimizer's state in the memory of the host.

    The results are those of `optimizer`. The step copies one part of the state at a time to the
    device, and copies it back while the next part arrives. `step_by_stages` copies the state of a
    stage while the backward pass computes the gradients of the next stage. A state that is on the
    device, such as one made by `optimizer`, is stepped there.

    Args:
        optimizer: from `in_place`, one that updates each leaf by itself, as AdamW and Lion do. (Not
            one that computes a number from all gradients.)

    Example:
        >>> import coat_jax as coat, jax, jax.numpy as jnp
        >>> params = {"w": jnp.ones((256, 256))}
        >>> optimizer = coat.optax.in_host_memory(coat.optax.in_place(coat.optax.fp8_adamw(1e-3)))
        >>> state = optimizer.init(params)
        >>> state.mu.codes["w"].sharding.memory_kind
        'pinned_host'
        >>> step = jax.jit(optimizer.step, donate_argnums=(0, 2))
        >>> params, state = step(params, {"w": jnp.ones((256, 256))}, state)
        >>> print(f"{params['w'][0, 0]:.3f}", state.mu.codes["w"].sharding.memory_kind)
        0.999 pinned_host
    """

    def init(params: optax.Params) -> Any:
        if isinstance(params, optax.LookaheadParams):
            raise UserError(
                "in_host_memory steps each parameter by itself, and optax.lookahead needs the fast "
                "and the slow copy of a parameter at once. Use it without in_host_memory."
            )
        state = optimizer.init(params)
        leaves, structure = jax.tree.flatten(state)
        shapes = [jnp.shape(param) for param in jax.tree.leaves(params)]
        for i, index in enumerate(followed_indices(state, params)):
            follows = index is not None and leaves[i].shape == shapes[index]
            if follows and leaves[i].nbytes >= SMALL:
                if not isinstance(leaves[i], jax.core.Tracer):
                    host_sharding(leaves[i].sharding)  # raises if its device cannot reach the host
                leaves[i] = jax.device_put(leaves[i], HOST)
        return jax.tree.unflatten(structure, leaves)

    def step(
        params: optax.Params,
        grads: optax.Updates,
        state: Any,
        *,
        grad_scale: Number = 1.0,
        skip: bool | Array = False,
        **extra_args: Any,
    ) -> tuple[optax.Params, Any]:
        arguments = {"grad_scale": grad_scale, "skip": skip, **extra_args}
        if not any(map(is_on_host, jax.tree.leaves(state))):
            return optimizer.step(params, grads, state, **arguments)
        require_like("gradients", grads, params, GRADIENTS, dtypes=False)
        gradients = jax.tree.leaves(grads)
        parts = Parts(params, state)
        for part in _divided(parts.sizes_on_host()):
            of_state, of_part = parts.state(part, [gradients[i] for i in part])
            updated = optimizer.step(
                parts.params(part), parts.like_params(part, of_part), of_state, **arguments
            )
            parts.update(part, updated)
        return parts.whole()

    return InPlaceOptimizer(init, step)


def _divided(sizes: Sequence[Sequence[int]]) -> list[list[int]]:
    """The indices of the parameters in each part; the first part has those with nothing to move."""
    parts = [[i for i, of_param in enumerate(sizes) if not of_param]]
    moved: list[int] = []
    for i, of_param in enumerate(sizes):
        if not of_param:
            continue
        # See `host_memory`: two arrays are copied on a stream of their own, and one is not.
        if not moved or (sum(moved) >= PART and len(moved) > 1):
            parts.append([])
            moved = []
        parts[-1].append(i)
        moved += of_param
    return [part for part in parts if part]
