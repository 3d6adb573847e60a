"""AdamW with each moment stored in a format of its own, for the arms of `loss_study`.

    m = b1 m + (1 - b1) g                 v = b2 v + (1 - b2) g^2
    u = m_hat / (sqrt(v_hat) + eps)       from the exact m and v of this step
    m, v <- first(m), second(v)           what the format leaves of them, saved in FP32

coat_jax stores both moments in 8 bits, and no setting stores only one of them so. Here a format is
a function from FP32 to FP32, so that one moment can stay exact and a new code can be tried before
it has a kernel. It saves no memory: it shows what a format costs in loss.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from coat_jax.numerics import expansion, logarithms, noise
from coat_jax.numerics.expansion import GROUP_SIZE
from coat_jax.numerics.formats import E4M3
from coat_jax.optax import FusedOptimizer
from coat_jax.storage import Storage
from coat_jax.training.config import TrainConfig
from coat_jax.training.optimizer import decayed
from coat_jax.training.schedule import learning_rate

Format = Callable[[Float[Array, "..."], Float[Array, "..."]], Float[Array, "..."]]


@dataclasses.dataclass(frozen=True)
class Expanded:
    """Expanded FP8, as coat_jax stores a moment; small leaves stay in FP32 as they do there.

    Attributes:
        storage: format, group size and which leaves stay in FP32.
        stochastic: whether to round stochastically, with the noise that is passed.
    """

    storage: Storage = Storage(first=E4M3, second=E4M3)
    stochastic: bool = False

    def __call__(
        self, values: Float[Array, "..."], uniform: Float[Array, "..."]
    ) -> Float[Array, "..."]:
        """The values after they were stored and read again."""
        if not self.storage.quantizes(values.shape):
            return values
        dither = uniform if self.stochastic else None
        size = self.storage.group_size
        stored = expansion.encode(values, self.storage.first, group_size=size, noise=dither)
        return expansion.decode(stored, group_size=size)


@dataclasses.dataclass(frozen=True)
class Logarithm:
    """8-bit logarithms, as coat_jax stores a second moment."""

    storage: Storage = Storage()

    def __call__(
        self, values: Float[Array, "..."], uniform: Float[Array, "..."]
    ) -> Float[Array, "..."]:
        """The values after they were stored and read again."""
        if not self.storage.quantizes(values.shape):
            return values
        size = self.storage.group_size
        return logarithms.decode(
            logarithms.encode(values, group_size=size, noise=uniform), group_size=size
        )


@dataclasses.dataclass(frozen=True)
class Separately:
    """One format for each moment; None leaves it in FP32.

    Attributes:
        first: of m. A frozen dataclass with `__call__(values, uniform)`, see `Expanded`.
        second: of v, likewise.
    """

    first: Format | None = None
    second: Format | None = None


def scale_by_adam(
    b1: float, b2: float, eps: float, formats: Separately
) -> optax.GradientTransformation:
    """Adam's direction; the state is optax's, its moments rounded to `formats` after each step."""

    def init(params: optax.Params) -> optax.ScaleByAdamState:
        return optax.ScaleByAdamState(
            jnp.zeros([], jnp.int32),
            jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params),
            jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params),
        )

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        count = optax.safe_increment(state.count)
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, updates)
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * jnp.square(g), state.nu, updates)
        first, second = 1 - b1**count, 1 - b2**count
        direction = jax.tree.map(lambda m, v: m / first / (jnp.sqrt(v / second) + eps), mu, nu)
        # A second key for v: both moments of an element must not share their noise.
        mu = _stored(mu, formats.first, count, seed=0)
        nu = _stored(nu, formats.second, count, seed=1)
        return direction, optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def _stored(moment: Any, form: Format | None, count: Array, seed: int) -> Any:
    """Every leaf of a moment, rounded by `form`."""
    if form is None:
        return moment
    leaves, structure = jax.tree.flatten(moment)
    stored = [
        form(leaf, noise.uniform(noise.leaf_key(seed, count, i), leaf.shape, run=GROUP_SIZE))
        for i, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, stored)


def adamw(config: TrainConfig, formats: Separately) -> FusedOptimizer:
    """The optimizer of a run, with the interface of the trainer's. Parameters are FP32."""
    of_run = config.optimizer
    tx = optax.chain(
        scale_by_adam(of_run.b1, of_run.b2, of_run.eps, formats),
        optax.add_decayed_weights(of_run.weight_decay, partial(decayed, config)),
        optax.scale_by_learning_rate(partial(learning_rate, of_run, config.total_steps)),
    )

    def step(
        params: Any, grads: Any, moments: Any, *, grad_scale: Any = 1.0, skip: Any = False
    ) -> tuple[Any, Any]:
        scaled = jax.tree.map(lambda g: g * grad_scale, grads)
        updates, new_moments = tx.update(scaled, moments, params)
        new = optax.apply_updates(params, updates), new_moments
        return jax.tree.map(lambda old, n: jnp.where(skip, old, n), (params, moments), new)

    return FusedOptimizer(tx.init, step)
