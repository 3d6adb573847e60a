"""Turns pairs of numbers in each head by an angle per token, and back.

    turn              (a, b) -> (a cos - b sin, b cos + a sin)        rotary embeddings
    turn_back         (a, b) -> (a cos + b sin, b cos - a sin)        its inverse, and its gradient
    turn_back_cast    the same, as one FP8 tensor in both layouts

a and b are the halves of a head. A turn changes no pair's length, so what it gives is at most
sqrt(2) times as large as what it takes: that bounds the FP8 tensor before it is computed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax.kernels import dispatch
from coat_jax.kernels.cast import cast_reference, rounding_of
from coat_jax.kernels.fp8 import rounded
from coat_jax.kernels.launch import kernel, launch
from coat_jax.kernels.rows import over_rows
from coat_jax.kernels.tiles import (
    first_column,
    load_tile,
    store_straight,
    store_transposed,
    tile_of,
    tiles,
)

if TYPE_CHECKING:
    import triton.language as tl

GROWTH = math.sqrt(2)
# A program turns some heads of some rows, so that it loads their angles once.
TILE_ROWS, HEADS, WARPS = 64, 4, 4
SMALLEST_HEAD = 32


def turn(
    x: Float[Array, "B S N H"], cos: Float[Array, "*B S P"], sin: Float[Array, "*B S P"]
) -> Float[Array, "B S N H"]:
    """Each head of `x` turned; P is H / 2."""
    cos, sin = cos[..., None, :], sin[..., None, :]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return turned.astype(x.dtype)


def turn_back(
    y: Float[Array, "B S N H"], cos: Float[Array, "*B S P"], sin: Float[Array, "*B S P"]
) -> Float[Array, "B S N H"]:
    """Each head of `y` turned the other way."""
    # As one loop over (a, b) and (b, a), in which XLA also finds the result's largest magnitude:
    # a pass over memory less where that is rounded to FP8 next. Nothing comes after `turn`.
    cos, sin = cos[..., None, None, :], sin[..., None, None, :]
    pairs = y.astype(jnp.float32).reshape(*y.shape[:-1], 2, -1)
    signs = jnp.array([[1.0], [-1.0]])
    turned = pairs * cos + jnp.flip(pairs, -2) * (signs * sin)
    return turned.reshape(y.shape).astype(y.dtype)


def turn_back_cast_reference(
    y: Float[Array, "B S N H"],
    cos: Float[Array, "*B S P"],
    sin: Float[Array, "*B S P"],
    scale: Float[Array, ""],
    dtype: DTypeLike,
) -> tuple[Array | None, Array | None]:
    """The codes of turn_back(y) / scale, [B, S, N H] and [N H, B, S]."""
    turned = turn_back(y.astype(jnp.float32), cos, sin)
    return cast_reference(turned.reshape(*y.shape[:2], -1), scale, dtype, "both")


def fits_turn_back_cast(head: int) -> bool:
    """Whether the kernel takes heads of this size: powers of two."""
    return head >= SMALLEST_HEAD and head & (head - 1) == 0


def turn_back_cast(
    y: Float[Array, "B S N H"],
    cos: Float[Array, "*B S P"],
    sin: Float[Array, "*B S P"],
    scale: Float[Array, ""],
    dtype: DTypeLike,
) -> tuple[Array | None, Array | None]:
    """`turn_back_cast_reference` as a kernel."""

    def run(y: Array, cos: Array, sin: Array, scale: Array) -> list[Array]:
        *rows, heads, head = y.shape
        count, columns = math.prod(rows), heads * head
        return launch(
            turn_back_cast_heads,
            y,
            cos,
            sin,
            scale,
            outputs=[
                jax.ShapeDtypeStruct(y.shape, dtype),
                jax.ShapeDtypeStruct((heads, head, *rows), dtype),
            ],
            aliases={},
            programs=tiles(count, columns, TILE_ROWS, HEADS * head),
            warps=WARPS,
            ROWS=count,
            COLUMNS=columns,
            TABLE_ROWS=math.prod(cos.shape[:-1]),
            HALF=head // 2,
            HEADS=HEADS,
            TILE_ROWS=TILE_ROWS,
            F8=rounding_of(dtype),
            FAST=not dispatch.interpreting(),
        )

    table = "b s !p" if cos.ndim == 3 else "s !p"
    straight, transposed = over_rows(
        run, [y, cos, sin, scale], ["b s n !h", table, table, ""], ["b s n !h", "n !h b s"]
    )
    return straight.reshape(*y.shape[:2], -1), transposed.reshape(-1, *y.shape[:2])


@kernel
def turn_back_cast_heads(
    y, cos, sin, scale, straight, transposed,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TABLE_ROWS: tl.constexpr, HALF: tl.constexpr,
    HEADS: tl.constexpr, TILE_ROWS: tl.constexpr, F8: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """One tile of rows, some heads."""
    WIDTH: tl.constexpr = 2 * HALF * HEADS
    row, _ = tile_of(COLUMNS, TILE_ROWS, WIDTH)
    pair = tl.arange(0, HALF)
    c = load_tile(cos, row % TABLE_ROWS, pair, TABLE_ROWS, HALF)
    s = load_tile(sin, row % TABLE_ROWS, pair, TABLE_ROWS, HALF)
    inverse = 1.0 / tl.load(scale)
    first = first_column(COLUMNS, WIDTH)
    for head in tl.static_range(HEADS):
        left = first + 2 * HALF * head + pair
        a = load_tile(y, row, left, ROWS, COLUMNS)
        b = load_tile(y, row, left + HALF, ROWS, COLUMNS)
        store_turned(
            (a * c + b * s) * inverse, straight, transposed, row, left,
            ROWS, COLUMNS, TILE_ROWS, WIDTH, F8, FAST,
        )  # fmt: skip
        store_turned(
            (b * c - a * s) * inverse, straight, transposed, row, left + HALF,
            ROWS, COLUMNS, TILE_ROWS, WIDTH, F8, FAST,
        )  # fmt: skip


@kernel
def store_turned(
    v, straight, transposed, row, column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, WIDTH: tl.constexpr,
    F8: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Half a head of each row, in both layouts."""
    codes = rounded(v, F8[0], F8[1], F8[2], FAST).to(straight.dtype.element_ty)
    store_straight(codes, straight, row, column, ROWS, COLUMNS)
    store_transposed(codes, transposed, row, column, ROWS, COLUMNS, TILE_ROWS, WIDTH)
