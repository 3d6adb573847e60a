"""Adam whose moments are rounded after every step, for ways to store them that have no step.

    m, v, u = adam_update(m, v, g)        in FP32, from what was read
    m, v   <- what is read of them after they were stored, saved in FP32

coat_jax stores both moments in formats of its own. Here one of them can stay in FP32
(`first_alone`, `second_alone`), and other codes can be tried: any function that returns what is
read again (`Store`). Where coat_jax's formats bound a small v from below, so do these.

`flash_optim` is the code of FlashOptim (arXiv 2602.23349), which has no such bound:

    m    127 * 2 x / (1 + |x|),  x = m / max |m|        v    255 sqrt(v / max v)

rounded to integers in groups of 32, with their largest m and sqrt(v) in FP16.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, UInt32

from coat_jax.kernels.adam import Hyper, adam_update
from coat_jax.numerics import noise
from coat_jax.numerics.formats import SMALLEST_NORMAL
from coat_jax.numerics.groups import join_groups, split_groups
from coat_jax.storage import DIRECTION, Storage
from experiments.moments import coders

Rows = Float[Array, "N D"]
FLASH_OPTIM_GROUP = 32


class Read(NamedTuple):
    """Both moments after they were stored and read again."""

    m: Rows
    v: Rows
    smallest_v: Float[Array, "..."] | float = 0.0  # that can be stored: see `adam_update`


# Stores m and v with the noise of a key, and reads them.
Store = Callable[[Rows, Rows, UInt32[Array, ""]], Read]


class StoredState(NamedTuple):
    """What was read after the last step, in FP32."""

    count: Array
    mu: Any
    nu: Any
    smallest: Any


def scale_by_stored_adam(hyper: Hyper, store: Store) -> optax.GradientTransformation:
    """Adam's direction, from moments that are stored and read again after every step."""

    def init(params: Any) -> StoredState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return StoredState(jnp.zeros([], jnp.int32), zeros, zeros, zeros)

    def update(grads: Any, state: StoredState, params: Any = None) -> tuple[Any, StoredState]:
        del params
        count = state.count + 1
        flat, tree = jax.tree.flatten(grads)
        updates, read = [], []
        old = (jax.tree.leaves(moment) for moment in (state.mu, state.nu, state.smallest))
        for leaf, (grad, mu, nu, smallest) in enumerate(zip(flat, *old, strict=True)):
            m, v, direction = adam_update(
                mu, nu, grad, count, hyper, nesterov=False, smallest_v=smallest
            )
            after = store(m, v, noise.leaf_key(0, count, leaf))
            updates.append(direction)
            read.append((after.m, after.v, jnp.broadcast_to(after.smallest_v, v.shape)))
        columns = (tree.unflatten(column) for column in zip(*read, strict=True))
        return tree.unflatten(updates), StoredState(count, *columns)

    return optax.GradientTransformation(init, update)


def coded(first: coders.Coder, second: Callable[[Rows, Rows], Rows]) -> Store:
    """A coder for each moment; that of v also takes a number in [0, 1) for each element."""

    def store(m: Rows, v: Rows, key: UInt32[Array, ""]) -> Read:
        return Read(first(m), second(v, noise.uniform(key, v.shape, run=coders.GROUP_SIZE)))

    return store


def both(storage: Storage, hyper: Hyper) -> Store:
    """As `scale_by_fp8_adam` stores them."""

    def store(m: Rows, v: Rows, key: UInt32[Array, ""]) -> Read:
        mu, nu = storage.write_moments(m, v, key, hyper.b1, hyper.b2)
        return Read(*storage.read_moments(mu, nu), storage.smallest_second(nu))

    return store


def first_alone(storage: Storage, hyper: Hyper) -> Store:
    """Only m in 8 bits. Directions are m over the root of the exact v."""

    def store(m: Rows, v: Rows, key: UInt32[Array, ""]) -> Read:
        if storage.first != DIRECTION:
            return Read(storage.read(storage.write_momentum(m, key, hyper.b1), storage.first), v)
        root = jnp.sqrt(jnp.maximum(v, SMALLEST_NORMAL))
        mu = storage.write_momentum(m / root, key, hyper.b1 / hyper.b2**0.5)
        return Read(storage.read(mu, DIRECTION) * root, v)

    return store


def second_alone(storage: Storage, hyper: Hyper) -> Store:
    """Only v in 8 bits."""

    def store(m: Rows, v: Rows, key: UInt32[Array, ""]) -> Read:
        return both(storage, hyper)(m, v, key)._replace(m=m)

    return store


def flash_optim(*, stochastic: bool) -> Store:
    """FlashOptim's codes; `stochastic` is of v."""

    def store(m: Rows, v: Rows, key: UInt32[Array, ""]) -> Read:
        share, largest = _shares(m)
        code = jnp.floor(127 * 2 * share / (1 + jnp.abs(share)) + 0.5) / 127
        first = join_groups(code / (2 - jnp.abs(code)) * largest, m.shape)
        share, largest = _shares(jnp.sqrt(v))
        up: Array | float = 0.5
        if stochastic:
            uniform = noise.uniform(key, v.shape, run=FLASH_OPTIM_GROUP)
            up = split_groups(uniform, FLASH_OPTIM_GROUP)
        root = join_groups(jnp.floor(255 * share + up) / 255 * largest, v.shape)
        return Read(first, jnp.square(root))

    return store


def _shares(x: Rows) -> tuple[Float[Array, "N G K"], Float[Array, "N G 1"]]:
    """Each element over the largest magnitude of its group, and that in FP16."""
    grouped = split_groups(x, FLASH_OPTIM_GROUP)
    largest = jnp.max(jnp.abs(grouped), axis=-1, keepdims=True)
    shares = grouped / jnp.where(largest > 0, largest, 1.0)
    return shares, largest.astype(jnp.float16).astype(jnp.float32)
