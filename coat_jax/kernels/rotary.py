"""The gradient of rotary embeddings: rotates pairs of numbers in each head back by their angles.

    rotary_backward         (a, b) -> (a cos + b sin, b cos - a sin)
    rotary_backward_cast    the same, as one FP8 tensor in both layouts

a and b are the halves of a head. A rotation preserves the length of each pair, so no element of the
result exceeds sqrt(2) times the largest input. That bounds the FP8 tensor before it is computed.
The forward pass has no kernel: it is in `ops.rotary`.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax.kernels.launch import Tile, Tiles, divide
from coat_jax.kernels.sharding import launch_sharded
from coat_jax.numerics.formats import format_of
from coat_jax.numerics.noise import NoiseStream, element_numbers

GROWTH = math.sqrt(2)
# A program rotates several heads of a tile of rows, so that it loads their angles once.
TILE_ROWS, HEADS, WARPS = 64, 4, 4
SMALLEST_HEAD = 32


def rotary_backward(
    y: Float[Array, "B S N H"], cos: Float[Array, "*B S P"], sin: Float[Array, "*B S P"]
) -> Float[Array, "B S N H"]:
    """Rotates each head of `y` by the negative angle."""
    # Written with a flip, not with the concatenation of `ops.rotary`: XLA can then find
    # the largest magnitude in the same loop, which saves a pass over memory where FP8 is next.
    pairs = y.astype(jnp.float32).reshape(*y.shape[:-1], 2, y.shape[-1] // 2)
    cos, sin, signs = (
        jnp.broadcast_to(x, pairs.shape)
        for x in (cos[..., None, None, :], sin[..., None, None, :], jnp.array([[1.0], [-1.0]]))
    )
    rotated = pairs * cos + jnp.flip(pairs, -2) * (signs * sin)
    return rotated.reshape(y.shape).astype(y.dtype)


def supports_head_dim(head: int) -> bool:
    """Whether the kernel takes heads of this size: powers of two."""
    return head >= SMALLEST_HEAD and head & (head - 1) == 0


def rotary_backward_cast(
    y: Float[Array, "B S N H"],
    cos: Float[Array, "*B S P"],
    sin: Float[Array, "*B S P"],
    scale: Float[Array, ""],
    dtype: DTypeLike,
    *,
    stream: NoiseStream | None = None,
) -> tuple[Array | None, Array | None]:
    """The codes of rotary_backward(y) / scale, [B, S, N H] and [N H, B, S]."""
    from coat_jax.kernels.triton.rotary import rotary_backward_cast_heads

    width, head = y.shape[2] * y.shape[3], y.shape[3]
    rows = columns = None
    if stream is not None:
        rows, columns = element_numbers((*y.shape[:2], width), stream)
        columns = columns.reshape(y.shape[2:])

    def grid(y: Array, cos: Array, *others: Array) -> dict[str, Any]:
        del others
        flat = jax.ShapeDtypeStruct((*y.shape[:2], y.shape[2] * head), y.dtype)
        angles = Tiles(math.prod(cos.shape[:-1]), head // 2, 1, head // 2, 1)
        tiles = divide(flat, tile=Tile(TILE_ROWS, HEADS * head, WARPS), block=head)
        return {"ANGLES": angles, **tiles}

    table = "b s !p" if cos.ndim == 3 else "s !p"
    straight, transposed = launch_sharded(
        rotary_backward_cast_heads,
        [
            (y, "b s n !h"),
            (cos, table),
            (sin, table),
            (scale, ""),
            (rows, "b s"),
            (columns, "n !h"),
        ],
        [("b s n !h", dtype), ("n !h b s", dtype)],
        grid,
        STOCHASTIC=stream is not None,
        F8=format_of(dtype),
    )
    return straight.reshape(*y.shape[:2], width), transposed.reshape(width, *y.shape[:2])
