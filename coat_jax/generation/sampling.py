"""How the next token is chosen from logits.

    p = softmax(logits / temperature)      temperature 0: the likeliest token, nothing random
    top_k                                  only the k likeliest
    top_p                                  of these the fewest that have this probability together

Each text has random numbers of its own, from the seed, its number and how far it has come: they
do not depend on the texts beside it.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to choose.

    Attributes:
        temperature: above 1 flattens the distribution, below 1 sharpens it; 0 takes the likeliest.
        top_k: how many tokens may be chosen, 0 for all. Equals of the last one may be, too.
        top_p: how much probability they have together, at least; 1 for all.
        seed: of the random numbers.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(
                f"temperature={self.temperature} must be 0, which takes the likeliest token, or "
                "above."
            )
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be 1 or more, or 0 for all tokens.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1.")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} must be 0 or more, and below 2^32.")


def choose(
    logits: Float[Array, "B V"],
    sampling: Sampling,
    numbers: Int[Array, "B"],
    steps: Int[Array, "B"],
) -> Int[Array, "B"]:
    """The next token of each text.

    Args:
        logits: in FP32.
        sampling: how to choose.
        numbers: of the texts, each its own.
        steps: how far each text has come.
    """
    if not sampling.temperature:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    kept = allowed(logits / sampling.temperature, sampling)
    key = jax.random.key(sampling.seed)

    def one(row: Array, number: Array, step: Array) -> Array:
        own = jax.random.fold_in(jax.random.fold_in(key, number), step)
        return jax.random.categorical(own, row)

    return jax.vmap(one)(kept, numbers, steps).astype(jnp.int32)


def allowed(logits: Float[Array, "B V"], sampling: Sampling) -> Float[Array, "B V"]:
    """The logits, -inf where a token may not be chosen."""
    if 0 < sampling.top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, sampling.top_k)[0][:, -1:]
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    if sampling.top_p < 1:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        shares = jax.nn.softmax(ordered)
        # A token is needed if those before it have too little; the first one always is.
        needed = jnp.cumsum(shares, axis=-1) - shares < sampling.top_p
        least = jnp.min(jnp.where(needed, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    return logits
