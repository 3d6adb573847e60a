"""An activation between FP8 and FP8, in two passes each way; the references are in `activation`.

    activation_forward    hidden -> blocks, and the largest magnitudes of a = act(hidden)
    activation_cast       blocks -> a as one FP8 tensor, straight or transposed
    activation_bounds     blocks, da -> the largest magnitudes of the gradients of hidden
    activation_backward   blocks, da -> those gradients as FP8 tensors in both layouts

Hidden is (gate, up), where a = act(gate) up, or (up,), where a = act(up). Magnitudes come one per
row and 128 columns: a 128th of the reading for whoever reduces them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax.blocks import Blocks
from coat_jax.formats import format_of
from coat_jax.kernels import dispatch
from coat_jax.kernels.activation import Activation
from coat_jax.kernels.cast import Layout, rounding_of, store_codes, tile_of
from coat_jax.kernels.fp8 import (
    activation,
    decoded_tile,
    fitting_exponent,
    inverse_power,
    magnitude_bits,
    power_of_two,
    rounded,
    through_fp8,
)
from coat_jax.kernels.launch import kernel, launch
from coat_jax.kernels.rows import as_rows, over_rows

if TYPE_CHECKING:
    import triton.language as tl

COLUMNS_PER_MAXIMUM = 128
TILE_ROWS = {"straight": 16, "transposed": 64}  # long columns, where a transpose is stored
WARPS = {"straight": 4, "transposed": 8}


def activation_forward(
    hidden: Sequence[Float[Array, "*rows F"]], act: Activation, dtype: DTypeLike, size: int
) -> tuple[tuple[Blocks, ...], Float[Array, "B S M"]]:
    """Blocks of `hidden`, with rows [B, S], and the largest magnitudes of its activation."""
    hidden = [as_rows(h) for h in hidden]

    def run(*hidden: Array) -> list[Array]:
        *rows, columns = hidden[0].shape
        codes = jax.ShapeDtypeStruct(hidden[0].shape, dtype)
        exponents = jax.ShapeDtypeStruct((*rows, -(-columns // size)), jnp.uint8)
        return launch(
            activation_forward_tile,
            hidden[0],
            hidden[-1],
            outputs=[codes, exponents, codes, exponents, _maxima(rows, columns)],
            aliases={},
            **_tiles(rows, columns, "straight"),
            SIZE=size,
            NAME=act,
            GATED=len(hidden) == 2,
            F8=rounding_of(dtype),
            TOP=format_of(dtype).top_exponent,
            FAST=not dispatch.interpreting(),
        )

    blocked = ["b s f", f"b s f/{size}"]
    *parts, maxima = over_rows(
        run, hidden, ["b s f"] * len(hidden), [*blocked, *blocked, f"b s f/{COLUMNS_PER_MAXIMUM}"]
    )
    kept = (Blocks(*parts[:2]), Blocks(*parts[2:]))
    return kept[: len(hidden)], maxima


def activation_cast(
    hidden: Sequence[Blocks], act: Activation, scale: Float[Array, ""], size: int, layout: Layout
) -> Array:
    """act(hidden) / scale as FP8 codes, in the blocks' format: [B, S, F] or [F, B, S]."""
    axes = "b s f" if layout == "straight" else "f b s"

    def run(scale: Array, *parts: Array) -> list[Array]:
        *rows, columns = parts[0].shape
        shape = parts[0].shape if layout == "straight" else (columns, *rows)
        return launch(
            activation_cast_tile,
            *parts[:2],
            *parts[-2:],
            scale,
            outputs=[jax.ShapeDtypeStruct(shape, parts[0].dtype)],
            aliases={},
            **_tiles(rows, columns, layout),
            SIZE=size,
            NAME=act,
            GATED=len(parts) == 4,
            TRANSPOSED=layout == "transposed",
            F8=rounding_of(parts[0].dtype),
            FAST=not dispatch.interpreting(),
        )

    parts = [part for blocks in hidden for part in blocks]
    (result,) = over_rows(run, [scale, *parts], ["", *_axes(hidden, size)], [axes])
    return result


def activation_bounds(
    hidden: Sequence[Blocks], da: Float[Array, "*rows F"], act: Activation, size: int
) -> tuple[Float[Array, "B S M"], ...]:
    """The largest magnitudes of the gradients of `hidden`, given that of its activation."""

    def run(da: Array, *parts: Array) -> list[Array]:
        *rows, columns = da.shape
        return launch(
            activation_bounds_tile,
            da,
            *parts[:2],
            *parts[-2:],
            outputs=[_maxima(rows, columns)] * 2,
            aliases={},
            **_tiles(rows, columns, "straight"),
            SIZE=size,
            NAME=act,
            GATED=len(parts) == 4,
        )

    parts = [part for blocks in hidden for part in blocks]
    maxima = f"b s f/{COLUMNS_PER_MAXIMUM}"
    results = over_rows(
        run, [as_rows(da), *parts], ["b s f", *_axes(hidden, size)], [maxima, maxima]
    )
    return results[: len(hidden)]


def activation_backward(
    hidden: Sequence[Blocks],
    da: Float[Array, "*rows F"],
    act: Activation,
    scales: Sequence[Float[Array, ""]],
    size: int,
    dtype: DTypeLike,
) -> list[tuple[Array, Array]]:
    """The gradients of `hidden` over their scales, as FP8 codes [B, S, F] and [F, B, S]."""

    def run(da: Array, first: Array, last: Array, *parts: Array) -> list[Array]:
        *rows, columns = da.shape
        straight = jax.ShapeDtypeStruct(da.shape, dtype)
        transposed = jax.ShapeDtypeStruct((columns, *rows), dtype)
        return launch(
            activation_backward_tile if len(parts) == 4 else plain_backward_tile,
            da,
            *parts[:2],
            *parts[-2:],
            first,
            last,
            outputs=[straight, transposed] * (len(parts) // 2),
            aliases={},
            **_tiles(rows, columns, "transposed"),
            SIZE=size,
            NAME=act,
            GATED=len(parts) == 4,
            F8=rounding_of(dtype),
            FAST=not dispatch.interpreting(),
        )

    parts = [part for blocks in hidden for part in blocks]
    results = over_rows(
        run,
        [as_rows(da), scales[0], scales[-1], *parts],
        ["b s f", "", "", *_axes(hidden, size)],
        ["b s f", "f b s"] * len(hidden),
    )
    return [(results[i], results[i + 1]) for i in range(0, len(results), 2)]


def _axes(hidden: Sequence[Blocks], size: int) -> list[str]:
    return ["b s f", f"b s f/{size}"] * len(hidden)


def _maxima(rows: Sequence[int], columns: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*rows, -(-columns // COLUMNS_PER_MAXIMUM)), jnp.float32)


def _tiles(rows: Sequence[int], columns: int, layout: str) -> dict[str, int]:
    """How the array is cut into tiles, each as wide as a maximum counts."""
    count, tile = math.prod(rows), TILE_ROWS[layout]
    return {
        "programs": -(-count // tile) * -(-columns // COLUMNS_PER_MAXIMUM),
        "warps": WARPS[layout],
        "ROWS": count,
        "COLUMNS": columns,
        "TILE_ROWS": tile,
        "TILE_COLUMNS": COLUMNS_PER_MAXIMUM,
    }


# --- Kernels ---------------------------------------------------------------------------------


@kernel
def store_maximum(
    maxima, v, row, column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """The largest magnitude of each row of a tile."""
    across: tl.constexpr = (COLUMNS + TILE_COLUMNS - 1) // TILE_COLUMNS
    bits = tl.where((column < COLUMNS)[None, :], magnitude_bits(v), 0)
    largest = tl.max(bits, axis=1).to(tl.float32, bitcast=True)
    at = row.to(tl.int64) * across + tl.min(column, axis=0) // TILE_COLUMNS
    tl.store(maxima + at, largest, mask=row < ROWS)


@kernel
def keep_tile(
    h, codes, exponents, row, column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    SIZE: tl.constexpr, F8: tl.constexpr, TOP: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Stores a tile as blocks; returns the values they stand for."""
    across: tl.constexpr = TILE_COLUMNS // SIZE
    blocks: tl.constexpr = (COLUMNS + SIZE - 1) // SIZE
    here = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
    at = row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    v = tl.load(h + at, mask=here, other=0.0).to(tl.float32)
    v = tl.reshape(v, [TILE_ROWS, across, SIZE])
    e = fitting_exponent(tl.max(magnitude_bits(v), axis=2), TOP)
    q = rounded(v * inverse_power(e)[:, :, None], F8[0], F8[1], F8[2], FAST)
    flat = tl.reshape(q, [TILE_ROWS, TILE_COLUMNS])
    tl.store(codes + at, flat.to(codes.dtype.element_ty), mask=here)
    block = tl.min(column, axis=0) // SIZE + tl.arange(0, across)
    there = (row < ROWS)[:, None] & (block < blocks)[None, :]
    at = row.to(tl.int64)[:, None] * blocks + block[None, :]
    tl.store(exponents + at, e.to(tl.uint8), mask=there)
    v = through_fp8(q, codes.dtype.element_ty, FAST) * power_of_two(e)[:, :, None]
    return tl.reshape(v, [TILE_ROWS, TILE_COLUMNS])


@kernel
def activation_forward_tile(
    gate, up, gate_codes, gate_exponents, up_codes, up_exponents, maxima,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    SIZE: tl.constexpr, NAME: tl.constexpr, GATED: tl.constexpr, F8: tl.constexpr,
    TOP: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    row, column = tile_of(ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS)
    g = keep_tile(
        gate, gate_codes, gate_exponents, row, column,
        ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS, SIZE, F8, TOP, FAST,
    )  # fmt: skip
    a, _ = activation(g, NAME)
    if GATED:
        a *= keep_tile(
            up, up_codes, up_exponents, row, column,
            ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS, SIZE, F8, TOP, FAST,
        )  # fmt: skip
    store_maximum(maxima, a, row, column, ROWS, COLUMNS, TILE_COLUMNS)


@kernel
def activation_cast_tile(
    gate_codes, gate_exponents, up_codes, up_exponents, scale, out,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    SIZE: tl.constexpr, NAME: tl.constexpr, GATED: tl.constexpr, TRANSPOSED: tl.constexpr,
    F8: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    row, column = tile_of(ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS)
    g = decoded_tile(
        gate_codes, gate_exponents, row, column, ROWS, COLUMNS, SIZE, TILE_ROWS, TILE_COLUMNS
    )
    a, _ = activation(g, NAME)
    if GATED:
        a *= decoded_tile(
            up_codes, up_exponents, row, column, ROWS, COLUMNS, SIZE, TILE_ROWS, TILE_COLUMNS
        )
    q = rounded(a * (1.0 / tl.load(scale)), F8[0], F8[1], F8[2], FAST).to(out.dtype.element_ty)
    store_codes(q, out, out, row, column, ROWS, COLUMNS, not TRANSPOSED, TRANSPOSED)


@kernel
def gradients_of_tile(
    da, gate_codes, gate_exponents, up_codes, up_exponents, row, column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    SIZE: tl.constexpr, NAME: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """The gradients of gate and up; without a gate the first is up's, the second of no use."""
    here = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
    at = row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    d = tl.load(da + at, mask=here, other=0.0).to(tl.float32)
    g = decoded_tile(
        gate_codes, gate_exponents, row, column, ROWS, COLUMNS, SIZE, TILE_ROWS, TILE_COLUMNS
    )
    a, slope = activation(g, NAME)
    d_up = d * a
    if GATED:
        d *= decoded_tile(
            up_codes, up_exponents, row, column, ROWS, COLUMNS, SIZE, TILE_ROWS, TILE_COLUMNS
        )
    return d * slope, d_up


@kernel
def activation_bounds_tile(
    da, gate_codes, gate_exponents, up_codes, up_exponents, first, second,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    SIZE: tl.constexpr, NAME: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    row, column = tile_of(ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS)
    d_gate, d_up = gradients_of_tile(
        da, gate_codes, gate_exponents, up_codes, up_exponents, row, column,
        ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS, SIZE, NAME, GATED,
    )  # fmt: skip
    store_maximum(first, d_gate, row, column, ROWS, COLUMNS, TILE_COLUMNS)
    if GATED:
        store_maximum(second, d_up, row, column, ROWS, COLUMNS, TILE_COLUMNS)


@kernel
def activation_backward_tile(
    da, gate_codes, gate_exponents, up_codes, up_exponents, first_scale, second_scale,
    first, first_transposed, second, second_transposed,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    SIZE: tl.constexpr, NAME: tl.constexpr, GATED: tl.constexpr, F8: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    row, column = tile_of(ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS)
    d_gate, d_up = gradients_of_tile(
        da, gate_codes, gate_exponents, up_codes, up_exponents, row, column,
        ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS, SIZE, NAME, GATED,
    )  # fmt: skip
    q = rounded(d_gate * (1.0 / tl.load(first_scale)), F8[0], F8[1], F8[2], FAST)
    q = q.to(first.dtype.element_ty)
    store_codes(q, first, first_transposed, row, column, ROWS, COLUMNS, True, True)
    if GATED:
        q = rounded(d_up * (1.0 / tl.load(second_scale)), F8[0], F8[1], F8[2], FAST)
        q = q.to(first.dtype.element_ty)
        store_codes(q, second, second_transposed, row, column, ROWS, COLUMNS, True, True)


@kernel
def plain_backward_tile(
    da, codes, exponents, codes_again, exponents_again, scale, scale_again,
    straight, transposed,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    SIZE: tl.constexpr, NAME: tl.constexpr, GATED: tl.constexpr, F8: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Without a gate there is one gradient only."""
    activation_backward_tile(
        da, codes, exponents, codes_again, exponents_again, scale, scale_again,
        straight, transposed, straight, transposed,
        ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS, SIZE, NAME, GATED, F8, FAST,
    )  # fmt: skip
