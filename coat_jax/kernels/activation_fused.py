"""An activation between FP8 and FP8, in two passes each way; the references are in `activation`.

    activation_forward    hidden -> blocks, and the largest magnitudes of a = act(hidden)
    activation_cast       blocks -> a as one FP8 tensor
    activation_backward   blocks, da -> those gradients as FP8 tensors in both layouts, and a,
                          transposed

Hidden is (gate, up), where a = act(gate) up, or (up,), where a = act(up). Magnitudes come one per
row and 32 columns: a 32nd of the reading for whoever reduces them, and few columns enough that a
mesh can cut widths like 11008 = 32 x 344 between them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax.kernels import dispatch
from coat_jax.kernels.activation import Activation
from coat_jax.kernels.cast import rounding_of
from coat_jax.kernels.fp8 import (
    activation,
    fitting_exponent,
    inverse_power,
    magnitude_bits,
    power_of_two,
    rounded,
    through_fp8,
)
from coat_jax.kernels.launch import kernel, launch
from coat_jax.kernels.rows import as_rows, over_rows
from coat_jax.kernels.tiles import (
    block_places,
    load_blocks,
    load_tile,
    store_straight,
    store_transposed,
    tile_of,
    tiles,
)
from coat_jax.numerics.blocks import Blocks
from coat_jax.numerics.formats import format_of

if TYPE_CHECKING:
    import triton.language as tl

COLUMNS_PER_MAXIMUM = 32  # or a block, if that is wider
# Rows and columns of a tile, warps of a program: the fastest on an H200.
TILES = {
    "forward": (32, 128, 4),
    "exact": (16, 128, 4),  # of `activation_exact`; not measured: no registers are spilled
    "cast": (32, 128, 8),
    "backward": (32, 128, 8),
}


def activation_forward(
    hidden: Sequence[Float[Array, "*rows F"]], act: Activation, dtype: DTypeLike, size: int
) -> tuple[tuple[Blocks, ...], Float[Array, "B S M"]]:
    """Blocks of `hidden`, with rows [B, S], and the largest magnitudes of its activation."""
    hidden = [as_rows(h) for h in hidden]
    per_maximum = max(size, COLUMNS_PER_MAXIMUM)

    def run(*hidden: Array) -> list[Array]:
        *rows, columns = hidden[0].shape
        codes = jax.ShapeDtypeStruct(hidden[0].shape, dtype)
        exponents = jax.ShapeDtypeStruct((*rows, -(-columns // size)), jnp.uint8)
        maxima = jax.ShapeDtypeStruct((*rows, -(-columns // per_maximum)), jnp.float32)
        return launch(
            activation_forward_tile,
            hidden[0],
            hidden[-1],
            outputs=[codes, exponents, codes, exponents, maxima],
            aliases={},
            **tiles_of(rows, columns, size, "forward"),
            PER_MAXIMUM=per_maximum,
            NAME=act,
            GATED=len(hidden) == 2,
            F8=rounding_of(dtype),
            TOP=format_of(dtype).top_exponent,
            FAST=not dispatch.interpreting(),
        )

    blocked = ["b s f", f"b s f/{size}"]
    *parts, maxima = over_rows(
        run, hidden, ["b s f"] * len(hidden), [*blocked, *blocked, f"b s f/{per_maximum}"]
    )
    kept = (Blocks(*parts[:2]), Blocks(*parts[2:]))
    return kept[: len(hidden)], maxima


def activation_cast(
    hidden: Sequence[Blocks], act: Activation, scale: Float[Array, ""], size: int
) -> Array:
    """act(hidden) / scale as FP8 codes, in the blocks' format."""

    def run(scale: Array, *parts: Array) -> list[Array]:
        *rows, columns = parts[0].shape
        return launch(
            activation_cast_tile,
            *parts[:2],
            *parts[-2:],
            scale,
            outputs=[jax.ShapeDtypeStruct(parts[0].shape, parts[0].dtype)],
            aliases={},
            **tiles_of(rows, columns, size, "cast"),
            NAME=act,
            GATED=len(parts) == 4,
            F8=rounding_of(parts[0].dtype),
            FAST=not dispatch.interpreting(),
        )

    parts = [part for blocks in hidden for part in blocks]
    (result,) = over_rows(run, [scale, *parts], ["", *_axes(hidden, size)], ["b s f"])
    return result


def activation_backward(
    hidden: Sequence[Blocks],
    da: Float[Array, "*rows F"],
    act: Activation,
    scale: Float[Array, ""],
    gradient_scales: Sequence[Float[Array, ""]],
    size: int,
    dtype: DTypeLike,
) -> tuple[Array, list[tuple[Array, Array]]]:
    """act(hidden) / scale as codes [F, B, S]; the gradients likewise, [B, S, F] and [F, B, S].

    Args:
        hidden: what was kept.
        da: the gradient of act(hidden).
        act: the activation.
        scale: of act(hidden), as in the forward pass.
        gradient_scales: one for each of `hidden`.
        size: of the blocks.
        dtype: of the gradients' codes; the activation's are in the blocks' format.
    """

    def run(da: Array, scale: Array, first: Array, last: Array, *parts: Array) -> list[Array]:
        *rows, columns = da.shape
        straight = jax.ShapeDtypeStruct(da.shape, dtype)
        transposed = jax.ShapeDtypeStruct((columns, *rows), dtype)
        again = jax.ShapeDtypeStruct((columns, *rows), parts[0].dtype)
        return launch(
            activation_backward_tile if len(parts) == 4 else plain_backward_tile,
            da,
            *parts[:2],
            *parts[-2:],
            scale,
            first,
            last,
            outputs=[again, *[straight, transposed] * (len(parts) // 2)],
            aliases={},
            **tiles_of(rows, columns, size, "backward"),
            NAME=act,
            GATED=len(parts) == 4,
            F8=rounding_of(parts[0].dtype),
            GRADIENT_F8=rounding_of(dtype),
            FAST=not dispatch.interpreting(),
        )

    parts = [part for blocks in hidden for part in blocks]
    again, *codes = over_rows(
        run,
        [as_rows(da), scale, gradient_scales[0], gradient_scales[-1], *parts],
        ["b s f", "", "", "", *_axes(hidden, size)],
        ["f b s", *["b s f", "f b s"] * len(hidden)],
    )
    return again, list(zip(codes[::2], codes[1::2], strict=True))


def _axes(hidden: Sequence[Blocks], size: int) -> list[str]:
    return ["b s f", f"b s f/{size}"] * len(hidden)


def tiles_of(rows: Sequence[int], columns: int, size: int, pass_: str) -> dict[str, int]:
    """How the array is cut into tiles."""
    count = math.prod(rows)
    tile_rows, tile_columns, warps = TILES[pass_]
    tile_columns = max(tile_columns, size)
    return {
        "programs": tiles(count, columns, tile_rows, tile_columns),
        "warps": warps,
        "ROWS": count,
        "COLUMNS": columns,
        "TILE_ROWS": tile_rows,
        "TILE_COLUMNS": tile_columns,
        "SIZE": size,
    }


# --- Kernels ---------------------------------------------------------------------------------


@kernel
def store_maxima(
    maxima, v, row,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    PER_MAXIMUM: tl.constexpr,
):  # fmt: skip
    """The largest magnitudes of a tile; beyond the array there are zeros."""
    v = tl.reshape(magnitude_bits(v), [TILE_ROWS, TILE_COLUMNS // PER_MAXIMUM, PER_MAXIMUM])
    at, there = block_places(row, ROWS, COLUMNS, TILE_COLUMNS, PER_MAXIMUM)
    tl.store(maxima + at, tl.max(v, axis=2).to(tl.float32, bitcast=True), mask=there)


@kernel
def keep_tile(
    v, codes, exponents, row, column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    SIZE: tl.constexpr, F8: tl.constexpr, TOP: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Stores a tile as blocks; returns the values they stand for."""
    v = tl.reshape(v, [TILE_ROWS, TILE_COLUMNS // SIZE, SIZE])
    e = fitting_exponent(tl.max(magnitude_bits(v), axis=2), TOP)
    q = rounded(v * inverse_power(e)[:, :, None], F8[0], F8[1], F8[2], FAST)
    flat = tl.reshape(q, [TILE_ROWS, TILE_COLUMNS]).to(codes.dtype.element_ty)
    store_straight(flat, codes, row, column, ROWS, COLUMNS)
    at, there = block_places(row, ROWS, COLUMNS, TILE_COLUMNS, SIZE)
    tl.store(exponents + at, e.to(tl.uint8), mask=there)
    v = through_fp8(q, codes.dtype.element_ty, FAST) * power_of_two(e)[:, :, None]
    return tl.reshape(v, [TILE_ROWS, TILE_COLUMNS])


@kernel
def activation_forward_tile(
    gate, up, gate_codes, gate_exponents, up_codes, up_exponents, maxima,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    SIZE: tl.constexpr, NAME: tl.constexpr, GATED: tl.constexpr, F8: tl.constexpr,
    TOP: tl.constexpr, PER_MAXIMUM: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    row, column = tile_of(COLUMNS, TILE_ROWS, TILE_COLUMNS)
    g = keep_tile(
        load_tile(gate, row, column, ROWS, COLUMNS), gate_codes, gate_exponents, row, column,
        ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS, SIZE, F8, TOP, FAST,
    )  # fmt: skip
    a, _ = activation(g, NAME, FAST)
    if GATED:
        a *= keep_tile(
            load_tile(up, row, column, ROWS, COLUMNS), up_codes, up_exponents, row, column,
            ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS, SIZE, F8, TOP, FAST,
        )  # fmt: skip
    store_maxima(maxima, a, row, ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS, PER_MAXIMUM)


@kernel
def activation_cast_tile(
    gate_codes, gate_exponents, up_codes, up_exponents, scale, out,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    SIZE: tl.constexpr, NAME: tl.constexpr, GATED: tl.constexpr, F8: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    row, column = tile_of(COLUMNS, TILE_ROWS, TILE_COLUMNS)
    g = load_blocks(
        gate_codes, gate_exponents, row, column, ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS, SIZE
    )
    a, _ = activation(g, NAME, FAST)
    if GATED:
        a *= load_blocks(
            up_codes, up_exponents, row, column, ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS, SIZE
        )
    q = rounded(a * (1.0 / tl.load(scale)), F8[0], F8[1], F8[2], FAST).to(out.dtype.element_ty)
    store_straight(q, out, row, column, ROWS, COLUMNS)


@kernel
def activation_backward_tile(
    da, gate_codes, gate_exponents, up_codes, up_exponents, scale, first_scale, second_scale,
    again, first, first_transposed, second, second_transposed,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    SIZE: tl.constexpr, NAME: tl.constexpr, GATED: tl.constexpr, F8: tl.constexpr,
    GRADIENT_F8: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    row, column = tile_of(COLUMNS, TILE_ROWS, TILE_COLUMNS)
    # Eight neighbours to a thread, not sixteen, which would fill its registers.
    column = column // 8 * 8 + column % 8
    d = load_tile(da, row, column, ROWS, COLUMNS)
    g = load_blocks(
        gate_codes, gate_exponents, row, column, ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS, SIZE
    )
    a, slope = activation(g, NAME, FAST)
    if GATED:
        q = rounded(
            d * a * (1.0 / tl.load(second_scale)),
            GRADIENT_F8[0], GRADIENT_F8[1], GRADIENT_F8[2], FAST,
        ).to(second.dtype.element_ty)  # fmt: skip
        store_straight(q, second, row, column, ROWS, COLUMNS)
        store_transposed(q, second_transposed, row, column, ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS)
        u = load_blocks(
            up_codes, up_exponents, row, column, ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS, SIZE
        )
        a *= u
        d *= u
    q = rounded(
        d * slope * (1.0 / tl.load(first_scale)),
        GRADIENT_F8[0], GRADIENT_F8[1], GRADIENT_F8[2], FAST,
    ).to(first.dtype.element_ty)  # fmt: skip
    store_straight(q, first, row, column, ROWS, COLUMNS)
    store_transposed(q, first_transposed, row, column, ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS)
    q = rounded(a * (1.0 / tl.load(scale)), F8[0], F8[1], F8[2], FAST).to(again.dtype.element_ty)
    store_transposed(q, again, row, column, ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS)


@kernel
def plain_backward_tile(
    da, codes, exponents, codes_again, exponents_again, scale, gradient_scale, scale_again,
    again, straight, transposed,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    SIZE: tl.constexpr, NAME: tl.constexpr, GATED: tl.constexpr, F8: tl.constexpr,
    GRADIENT_F8: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Without a gate there is one gradient only."""
    activation_backward_tile(
        da, codes, exponents, codes_again, exponents_again, scale, gradient_scale, scale_again,
        again, straight, transposed, straight, transposed,
        ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS, SIZE, NAME, GATED, F8, GRADIENT_F8, FAST,
    )  # fmt: skip
