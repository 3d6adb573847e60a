"""Groups: neighbours along the last axis of an array that share a scale.

An array and its scales are thus sharded alike, and the result does not depend on the mesh. The last
group of a row may be short.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from coat_jax.numerics import mesh_axes

FLOAT32_MAX = float(jnp.finfo(jnp.float32).max)


def scales_shape(shape: tuple[int, ...], group_size: int) -> tuple[int, ...]:
    """The shape of one number per group: like `shape`, the last axis divided, rounded up."""
    return (*shape[:-1], -(-shape[-1] // group_size)) if shape else ()


def split_groups(x: Float[Array, "*rows D"], group_size: int) -> Float[Array, "*rows G K"]:
    """Views the last axis as groups of `group_size`, or as one group if it is shorter.

    A short last group of several is padded with zeros.
    """
    x = jnp.atleast_1d(x)
    sharding = jax.typeof(x).sharding
    entry = sharding.spec[-1]  # of explicit axes, on which JAX does not gather by itself
    parts = 1 if entry is None else mesh_axes.shards(entry, sharding.mesh)
    if parts > 1 and x.shape[-1] % (parts * group_size):
        raise ValueError(
            f"The last axis, {x.shape[-1]}, is sharded over {entry!r} into {parts} parts, which "
            f"do not hold whole groups of {group_size}. Shard another axis, or choose a "
            f"group_size that divides {x.shape[-1] // parts}."
        )
    size = min(group_size, max(x.shape[-1], 1))
    tail = -x.shape[-1] % size
    if tail:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, tail)])
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def join_groups(x: Float[Array, "*rows G K"], shape: tuple[int, ...]) -> Float[Array, "*rows D"]:
    """The inverse of `split_groups`: back to `shape`, without the padding."""
    flat = x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])
    return flat[..., : shape[-1] if shape else 1].reshape(shape)


def group_max(magnitudes: Float[Array, "*rows G K"]) -> Float[Array, "*rows G"]:
    """The largest magnitude per group, ignoring NaN; infinity becomes the largest FP32."""
    known = jnp.where(jnp.isnan(magnitudes), 0.0, magnitudes)
    return jnp.minimum(jnp.max(known, axis=-1, initial=0.0), FLOAT32_MAX)


def to_groups(x: Float[Array, "*rows D"], group_size: int) -> Float[Array, "*rows G K"]:
    """Returns `split_groups` of `x` in FP32; raises if `x` or the size is of another kind."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x has dtype {x.dtype.name}, which FP8 cannot hold. Pass real floats.")
    if type(group_size) is not int or group_size < 1:
        raise ValueError(f"The group size must be a positive whole number, not {group_size!r}.")
    return split_groups(x.astype(jnp.float32), group_size)
