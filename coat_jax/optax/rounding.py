"""Updates of BF16 parameters that are right on average, without FP32 master copies.

BF16 has 8 bits of precision: an update smaller than 1/512 of its parameter is lost when their
sum is rounded to nearest. Rounded up or down at random, with probabilities set by the distances,
the sum is right on average. The random numbers are hashed from seed, step, leaf and index
(`coat_jax.numerics.noise`): the same run gives the same parameters, on any mesh.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int32

from coat_jax.numerics import noise
from coat_jax.numerics.expansion import GROUP_SIZE
from coat_jax.optax.checks.arguments import require_seed, require_step_number
from coat_jax.optax.checks.trees import dtype_of, require_same_shapes, require_state_of


class StochasticRoundState(NamedTuple):
    """The state of `stochastic_round_updates`."""

    count: Int32[Array, ""]  # type: ignore[assignment]


def stochastic_round_updates(seed: int = 0) -> optax.GradientTransformation:
    """Makes `optax.apply_updates` round BF16 parameters stochastically. Put it last in a chain.

    The update of a BF16 parameter becomes the difference, in FP32, between the stochastically
    rounded sum and the parameter. Updates of other parameters pass unchanged.

    Args:
        seed: seeds the random numbers.
    """
    require_seed(seed)

    def init(params: optax.Params) -> StochasticRoundState:
        del params
        return StochasticRoundState(jnp.zeros([], jnp.int32))

    def update(
        updates: optax.Updates, state: StochasticRoundState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, StochasticRoundState]:
        if params is None:
            raise ValueError(
                "stochastic_round_updates needs the parameters that it rounds for: call "
                "tx.update(updates, state, params)."
            )
        require_state_of(StochasticRoundState, state)
        count = optax.safe_increment(state.count)
        new = apply_updates(params, updates, step=count, seed=seed)

        def difference(p: Any, u: Any, q: Any) -> Any:
            if dtype_of(p) != jnp.bfloat16:
                return u
            return q.astype(jnp.float32) - p.astype(jnp.float32)

        return jax.tree.map(difference, params, updates, new), StochasticRoundState(count)

    return optax.GradientTransformation(init, update)


def apply_updates(
    params: optax.Params, updates: optax.Updates, *, step: ArrayLike, seed: int = 0
) -> optax.Params:
    """`optax.apply_updates`, with BF16 parameters rounded stochastically.

    Args:
        params: parameters of any dtype.
        updates: what is added to them.
        step: the number of this step, so that the rounding of each step is independent.
        seed: seeds the random numbers.
    """
    require_seed(seed)
    require_step_number(step)
    require_same_shapes("updates", updates, params)
    leaves, structure = jax.tree.flatten(params)
    pairs = [
        (jnp.asarray(p), jnp.asarray(u))
        for p, u in zip(leaves, jax.tree.leaves(updates), strict=True)
    ]
    new = [
        _apply(p, u, noise.distinguish(noise.leaf_key(seed, step, leaf), p, u))
        for leaf, (p, u) in zip(noise.leaf_ids(params), pairs, strict=True)
    ]
    return jax.tree.unflatten(structure, new)


def _apply(p: Array, u: Array, key: Any) -> Float[Array, "..."]:
    if p.dtype != jnp.bfloat16:
        return (p + u).astype(p.dtype)
    total = p.astype(jnp.float32) + u.astype(jnp.float32)
    return noise.round_to_bfloat16(total, noise.param_key(key), run=GROUP_SIZE)
