"""A training step whose backward pass updates parameters as it goes and frees their gradients.

    x = stage(params, x)                           for each stage; the last one returns the loss
    gradients, dx = pullback(dx)                   for each stage, in reverse
    params, state = optimizer.step(.., gradients)  at once, for the leaves of that stage

Only the gradients of one stage exist at a time. So nothing can depend on all of them before the
first update: neither clipping by their norm nor whether to skip the step. Instead:

    grad_scale     comes from the norm that the previous step returned, or from the norm of a stage
    skip           applies to each stage by itself, if its gradients or the loss are not finite
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float

from coat_jax.kernels.adam import Number
from coat_jax.optax.clipping import global_norm
from coat_jax.optax.in_place import InPlaceOptimizer
from coat_jax.optax.partitioned.parts import Parts
from coat_jax.validation import brief


class Stage(NamedTuple):
    """A part of a model.

    Attributes:
        select: a function from all parameters to those that this stage uses, in any tree, such as
            lambda params: params["layers"][3].
        apply: a function from these parameters and the result of the stage before to the input of
            the next one. The first stage gets None; the last one returns the loss.
    """

    select: Callable[[Any], Any]
    apply: Callable[[Any, Any], Any]


class Stepped(NamedTuple):
    """What `step_by_stages` returns.

    Attributes:
        loss: before the update.
        gradient_norm: the norm of all gradients together, before `grad_scale`.
        params: the parameters after the update.
        state: the state of the optimizer after the update.
        skipped: whether a stage was not updated.
    """

    loss: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    params: Any
    state: Any
    skipped: Array


def step_by_stages(
    optimizer: InPlaceOptimizer,
    stages: Sequence[Stage],
    params: optax.Params,
    state: Any,
    *,
    grad_scale: Number | Callable[[Float[Array, ""]], Number] = 1.0,
) -> Stepped:
    """Computes a loss and its gradients, and updates each stage once its gradients are computed.

    Donate `params` and `state`. A leaf that several stages use, such as a tied embedding, is
    updated when the backward pass reaches the first of these stages. A stage whose gradients are
    not finite keeps its parameters and moments, and the step is not counted. If the loss is not
    finite, nothing changes.

    Args:
        optimizer: an optimizer that updates each leaf by itself, as AdamW and Lion do, and computes
            nothing from all gradients together.
        stages: the stages of the model, from its input to its loss.
        params: the parameters.
        state: the state of the optimizer.
        grad_scale: multiplies the gradients; a number, or a function from the norm of a stage's
            gradients to a number.

    Example:
        >>> import coat_jax as coat, jax, jax.numpy as jnp
        >>> params = {"first": jnp.ones((4, 8)), "second": jnp.ones(8)}
        >>> stages = (
        ...     coat.optax.Stage(lambda p: p["first"], lambda w, _: jnp.ones((2, 4)) @ w),
        ...     coat.optax.Stage(lambda p: p["second"], lambda w, x: jnp.mean(jnp.square(x @ w))),
        ... )
        >>> optimizer = coat.optax.in_place(coat.optax.fp8_adamw(1e-2))
        >>> step = jax.jit(coat.optax.step_by_stages, static_argnums=(0, 1))
        >>> stepped = step(optimizer, stages, params, optimizer.init(params))
        >>> print(stepped.loss)
        1024.0
    """
    if not isinstance(stages, list | tuple) or not all(isinstance(s, Stage) for s in stages):
        raise TypeError(f"stages={brief(stages)} must be a list or tuple of coat_jax.optax.Stage.")
    used = _leaves_of_stages(stages, params)
    pullbacks, x = [], None
    for stage in stages:
        x, pullback = jax.vjp(stage.apply, stage.select(params), x)
        pullbacks.append(pullback)
    loss: Any = x
    if jnp.shape(loss) != () or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        raise ValueError(
            f"The last stage returned {brief(loss)}: it must return the loss, a number."
        )
    unusable = ~jnp.isfinite(loss)
    parts = Parts(params, state)
    pending: dict[int, Array] = {}
    squares: Any = jnp.zeros([], jnp.float32)
    skipped: Any = False
    dx: Any = jnp.ones_like(loss)
    for i in reversed(range(len(stages))):
        of_stage, dx = pullbacks.pop()(dx)
        for leaf, gradient in zip(used[i], jax.tree.leaves(of_stage), strict=True):
            pending[leaf] = pending[leaf] + gradient if leaf in pending else gradient
        of_earlier = {leaf for leaves in used[:i] for leaf in leaves}
        ready = [leaf for leaf in dict.fromkeys(used[i]) if leaf not in of_earlier]
        if not ready:
            continue
        gradients = [pending.pop(leaf) for leaf in ready]
        # XLA is free to reorder what follows. The two barriers make it overwrite parameters after
        # their last use here, and before the next stage computes its gradients.
        gradients, dx = lax.optimization_barrier((gradients, dx))
        norm = global_norm(gradients)
        skip = unusable | ~jnp.isfinite(norm)
        of_state, gradients = parts.state(ready, gradients)
        updated: Any = optimizer.step(
            parts.params(ready),
            parts.like_params(ready, gradients),
            of_state,
            grad_scale=grad_scale(norm) if callable(grad_scale) else grad_scale,
            skip=skip,
        )
        squares, skipped = squares + jnp.square(norm), skipped | skip
        squares, dx = parts.update(ready, updated, skipped, before=(squares, dx))
    return Stepped(loss, jnp.sqrt(squares), *parts.whole(), skipped)


class _Place:
    """A placeholder for a leaf of the parameters: stages may select it, but not compute with it."""

    def __init__(self, number: int):
        self.number = number


def _leaves_of_stages(stages: Sequence[Stage], params: optax.Params) -> list[list[int]]:
    """The indices of the leaves that each stage uses; raises unless every leaf is used."""
    structure: Any = jax.tree.structure(params)
    places = jax.tree.unflatten(structure, map(_Place, range(structure.num_leaves)))
    used = []
    for i, stage in enumerate(stages):
        try:
            used.append([leaf.number for leaf in jax.tree.leaves(stage.select(places))])
        except (AttributeError, TypeError) as error:
            raise ValueError(
                f"The `select` of stage {i} must return leaves of the parameters as they are: "
                f"{error}. Transpose, slice, cast and compute in its `apply`."
            ) from error
    for number, (path, _) in enumerate(jax.tree.leaves_with_path(params)):
        if not any(number in leaves for leaves in used):
            raise ValueError(
                f"No stage selects params{jax.tree_util.keystr(path)}, so it would never be "
                "updated. Select it in the stage that uses it."
            )
    return used
