"""What rounding does to v over thousands of steps: the long-horizon test of a moment's storage.

    v = b2 v + (1 - b2) g^2,    g ~ N(0, sigma^2) per coordinate, stored in 8 bits every step

At b2 = 0.999 a step's decay is 0.1 % of v, far less than half a code (6 % / k in E4M3). Rounded
to nearest, a coordinate cannot fall below its place within the group: it only moves where a
gradient is large enough to lift it. Where the whole group falls, v falls with it, because the
group's maximum is stored in FP32. Rounded stochastically every coordinate falls on average, at
the price of a random walk, whose steps are largest at FP8's smallest codes. coat_jax keeps clear
of those (`expansion.HEADROOM`); "2^-9" does not: there the smallest code holds up elements that
reach it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, UInt32

from coat_jax.numerics import expansion, noise, qtensor
from coat_jax.numerics.formats import E4M3
from experiments.moments import coders

STORAGES = ("FP32", "plain nearest", "nearest", "stochastic, 2^-9", "stochastic")
SAMPLES = 50
EPS = 1e-8
FALL = 1e-2  # of the gradients' scale, halfway

Rows = Float[Array, "N D"]


class Drift(NamedTuple):
    """v by storage, over the coordinates that fall (over all where none does)."""

    step: list[int]
    mean: dict[str, list[float]]  # of v over time, over the mean of sigma^2
    update_rms: dict[str, list[float]]  # of u / u_FP32 - 1 over time, u = 1 / (sqrt(v) + EPS)
    bias: dict[str, float]  # of the mean of v at the end, against FP32: 0.5 is half too high
    update_bias: dict[str, float]  # mean of u / u_FP32 - 1 at the end


def simulate(
    sigma: Rows, falling: Bool[Array, "N D"], *, b2: float, steps: int, seed: int
) -> Drift:
    """Runs v from zero under every storage, all on the same gradients.

    Args:
        sigma: standard deviation of each coordinate's gradients, groups along the last axis.
        falling: the coordinates whose gradients shrink by `FALL` halfway.
        b2: decay rate.
        steps: how many; the curves have `SAMPLES` points.
        seed: of the gradients and of stochastic rounding.
    """
    interval = max(steps // SAMPLES, 1)
    key = jax.random.key(seed)
    watched = falling | ~falling.any()

    def one(carry: tuple[Rows, ...], t: ArrayLike) -> tuple[tuple[Rows, ...], None]:
        scale = jnp.where(falling & (2 * t >= steps), FALL, 1.0)
        g = scale * sigma * jax.random.normal(jax.random.fold_in(key, t), sigma.shape)
        rounding = noise.leaf_key(seed, t, 0)
        stored = (
            _stored(storage, b2 * v + (1 - b2) * g * g, rounding)
            for storage, v in zip(STORAGES, carry, strict=True)
        )
        return tuple(stored), None

    @jax.jit
    def sample(carry: tuple[Rows, ...], start: ArrayLike) -> tuple[tuple[Rows, ...], Array]:
        carry, _ = jax.lax.scan(one, carry, start + jnp.arange(interval))
        exact = carry[0]
        errors = [(jnp.sqrt(exact) + EPS) / (jnp.sqrt(v) + EPS) - 1 for v in carry]
        mean = jnp.stack([v.mean(where=watched) for v in carry])
        rms = jnp.stack([jnp.sqrt((e * e).mean(where=watched)) for e in errors])
        update_bias = jnp.stack([e.mean(where=watched) for e in errors])
        expected = (sigma**2).mean(where=watched)
        return carry, jnp.stack([mean / expected, rms, mean / mean[0] - 1, update_bias])

    carry = (jnp.zeros_like(sigma),) * len(STORAGES)
    ends = range(interval, steps + 1, interval)
    samples = []
    for end in ends:
        carry, figures = sample(carry, end - interval)
        samples.append(np.asarray(figures))
    mean, rms, bias, update_bias = np.moveaxis(np.array(samples), 0, 2)  # storages x samples

    def named(figures: np.ndarray) -> dict[str, Any]:
        return dict(zip(STORAGES, figures.tolist(), strict=True))

    return Drift(list(ends), named(mean), named(rms), named(bias[:, -1]), named(update_bias[:, -1]))


def _stored(storage: str, v: Rows, key: UInt32[Array, ""]) -> Rows:
    """v after one encode and decode."""
    if storage == "FP32":
        return v
    if storage == "plain nearest":
        return qtensor.dequantize(qtensor.quantize(v, E4M3, group_size=expansion.GROUP_SIZE))
    random = noise.uniform(key, v.shape, run=expansion.GROUP_SIZE)
    if storage == "stochastic, 2^-9":
        return coders.stochastic_with_exponent(coders.smallest_at(9), v, random)
    return expansion.decode(expansion.encode(v, noise=random if storage == "stochastic" else None))
