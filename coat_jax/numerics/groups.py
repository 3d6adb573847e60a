"""Groups: neighbours along the last axis of an array that share a scale.

An array and its scales are thus sharded alike, and the result does not depend on the mesh. The last
group of a row may be short.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
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
    require_group_size(group_size)
    _require_whole_groups(x, group_size)
    x = jnp.atleast_1d(x)
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


def require_group_size(group_size: int, name: str = "group_size") -> None:
    """Raises unless the argument `name` is a positive whole number."""
    if not isinstance(group_size, int) or isinstance(group_size, bool) or group_size < 1:
        raise ValueError(f"{name} must be a positive whole number, not {group_size!r}.")


def _require_whole_groups(x: Array, group_size: int) -> None:
    """Raises where an explicit sharding divides the last axis inside a group."""
    sharding = jax.typeof(x).sharding
    if x.ndim == 0 or not sharding.mesh.axis_names or sharding.spec[-1] is None:
        return
    entry = sharding.spec[-1]
    parts = mesh_axes.shards(entry, sharding.mesh)
    if x.shape[-1] % (parts * group_size):
        raise ValueError(
            f"The last axis, {x.shape[-1]}, is sharded over {entry!r} into {parts} parts, which "
            f"do not hold whole groups of {group_size}. Shard another axis, or choose a "
            f"group_size that divides {x.shape[-1] // parts}."
        )


def require_float(name: str, dtype: DTypeLike) -> None:
    """Raises unless `dtype` is a real floating-point dtype."""
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"{name} has dtype {jnp.dtype(dtype).name}, which FP8 cannot hold. Pass real floats."
        )
