"""How the next token is chosen from logits.

    p = softmax(logits / temperature)      temperature 0: the likeliest token, nothing random
    top_k                                  only the k likeliest
    top_p                                  of these the fewest that have this probability together

The random numbers of a text come from the seed, its number and its length so far. They do not
depend on the other texts of a batch.
"""

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from coat_jax.validation import Between, CountOrZero, Seed, require_fields

TINY = 1e-37  # about the smallest number that XLA does not flush to 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """The settings with which a token is chosen.

    Attributes:
        temperature: above 1 flattens the distribution, below 1 sharpens it; 0 takes the likeliest.
        top_k: how many tokens may be chosen, 0 for all. Ties with the k-th are kept.
        top_p: the least probability that the allowed tokens have together; 1 allows all.
        seed: of the random numbers.
    """

    temperature: Annotated[float, Between(least=0, most=1e30)] = 0.8
    top_k: CountOrZero = 0
    top_p: Annotated[float, Between(above=0, most=1)] = 1.0
    seed: Seed = 0

    def __post_init__(self) -> None:
        require_fields(self)


def choose(
    logits: Float[Array, "B V"],
    sampling: Sampling,
    numbers: Int[Array, " B"],
    steps: Int[Array, " B"],
) -> Int[Array, " B"]:
    """Returns the next token of each text.

    Args:
        logits: in FP32.
        sampling: how to choose.
        numbers: of the texts, each its own.
        steps: how many tokens each text has so far.
    """
    if not sampling.temperature:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # Less the largest one, no logit is too large to be divided by a small temperature.
    logits = logits - jnp.max(logits, axis=-1, keepdims=True)
    logits = restrict(logits / max(sampling.temperature, TINY), sampling)
    key = jax.random.key(sampling.seed)

    def one(row: Array, number: Array, step: Array) -> Array:
        own = jax.random.fold_in(jax.random.fold_in(key, number), step)
        return jax.random.categorical(own, row)

    return jax.vmap(one)(logits, numbers, steps).astype(jnp.int32)


def restrict(logits: Float[Array, "B V"], sampling: Sampling) -> Float[Array, "B V"]:
    """Returns the logits, -inf where a token may not be chosen."""
    if 0 < sampling.top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, sampling.top_k)[0][:, -1:]
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    if sampling.top_p < 1:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        shares = jax.nn.softmax(ordered)
        # A token is needed if those before it have too little; the first one always is.
        needed = jnp.cumsum(shares, axis=-1) - shares < sampling.top_p
        needed = needed.at[..., 0].set(True)  # however small top_p is in FP32
        least = jnp.min(jnp.where(needed, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    return logits
