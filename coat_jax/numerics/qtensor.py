"""Linear FP8 quantization with one scale per group of neighbours.

    codes = cast(x / scale),    scale = max|group| / FP8 max,    x ~ codes * scale

Groups lie along the last axis only, so that an array and its scales are sharded alike
and the result does not depend on the mesh; the last group of a row may be short. `scale`
always multiplies a code to decode it. Zero stays zero, NaN stays in its own place,
infinity saturates. Groups whose values crowd into a few binades waste most of FP8's
range: for optimizer moments see `expansion`.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax.numerics import mesh_axes
from coat_jax.numerics.formats import E4M3, format_of, saturating_cast
from coat_jax.numerics.one_program import one_program

FLOAT32_MAX = float(jnp.finfo(jnp.float32).max)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QTensor:
    """An array in FP8: `codes` has its shape, `scale` one FP32 number per group."""

    codes: Float[Array, "*rows D"]
    scale: Float[Array, "*rows G"]
    group_size: int = dataclasses.field(metadata={"static": True})


@one_program("x")
def quantize(x: Float[Array, "*rows D"], dtype: DTypeLike = E4M3, *, group_size: int) -> QTensor:
    """Rounds `x` to `dtype`, with one scale per `group_size` neighbours.

    Example:
        >>> import coat_jax as coat, jax.numpy as jnp
        >>> q = coat.qtensor.quantize(jnp.arange(256.0), group_size=128)
        >>> print(q.codes.dtype.name, q.scale.shape, f"{coat.qtensor.dequantize(q)[-1]:.1f}")
        float8_e4m3fn (2,) 255.0
    """
    require_float("x", x.dtype)
    x = x.astype(jnp.float32)
    grouped = split_groups(x, group_size)
    scale = group_max(jnp.abs(grouped)) / format_of(dtype).max
    # A group of zeros has scale 0; with any other divisor its codes are zero, too.
    divisor = jnp.where(scale > 0, scale, 1.0)
    codes = saturating_cast(grouped / divisor[..., None], dtype)
    return QTensor(
        join_groups(codes, x.shape), scale.reshape(scales_shape(x.shape, group_size)), group_size
    )


@one_program("q")
def dequantize(q: QTensor) -> Float[Array, "*rows D"]:
    """Returns the FP32 values that `q` stands for."""
    grouped = split_groups(q.codes, q.group_size).astype(jnp.float32)
    values = grouped * q.scale.reshape(grouped.shape[:-1])[..., None]
    return join_groups(values, q.codes.shape)


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
