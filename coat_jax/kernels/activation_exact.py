"""The forward pass of an activation that computes with gate and up as they come, on a GPU.

    activation_forward_exact    hidden -> blocks; a = act(hidden) in FP8, and its largest magnitudes
    activation_rescale          a, magnitudes -> a as one FP8 tensor

As in `activation_fused`, the tensor's scale must be known before its codes are written, hence two
passes. The first one holds the exact values: it writes a with one scale per row and 32 columns, a
power of two that follows from the magnitude there. The second one only moves codes from that scale
to the tensor's. Both scales are powers of two, so a code changes only where it becomes subnormal.
The two passes move as many bytes as those that compute with the blocks.

The backward pass recomputes a from the blocks, with the scale of the forward pass. So magnitudes
are the largest of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax.kernels import dispatch
from coat_jax.kernels.activation import Activation
from coat_jax.kernels.activation_fused import COLUMNS_PER_MAXIMUM, keep_tile, tiles_of
from coat_jax.kernels.cast import rounding_of
from coat_jax.kernels.fp8 import (
    activation,
    fitting_exponent,
    inverse_power,
    magnitude_bits,
    power_of_two,
    rounded,
)
from coat_jax.kernels.launch import kernel, launch
from coat_jax.kernels.rows import as_rows, over_rows
from coat_jax.kernels.tiles import block_places, load_tile, store_straight, tile_of
from coat_jax.numerics.blocks import Blocks
from coat_jax.numerics.formats import format_of

if TYPE_CHECKING:
    import triton.language as tl


def activation_forward_exact(
    hidden: Sequence[Float[Array, "*rows F"]], act: Activation, dtype: DTypeLike, size: int
) -> tuple[tuple[Blocks, ...], Array, Float[Array, "B S M"]]:
    """Blocks of `hidden`; the activation's codes [B, S, F]; and its largest magnitudes.

    The codes have one scale per row and magnitude: see `activation_rescale`.
    """
    hidden = [as_rows(h) for h in hidden]
    per_maximum = max(size, COLUMNS_PER_MAXIMUM)

    def run(*hidden: Array) -> list[Array]:
        *rows, columns = hidden[0].shape
        codes = jax.ShapeDtypeStruct(hidden[0].shape, dtype)
        exponents = jax.ShapeDtypeStruct((*rows, -(-columns // size)), jnp.uint8)
        maxima = jax.ShapeDtypeStruct((*rows, -(-columns // per_maximum)), jnp.float32)
        return launch(
            activation_forward_exact_tile,
            hidden[0],
            hidden[-1],
            outputs=[codes, exponents, codes, exponents, codes, maxima],
            aliases={},
            **tiles_of(rows, columns, size, "exact"),
            PER_MAXIMUM=per_maximum,
            NAME=act,
            GATED=len(hidden) == 2,
            F8=rounding_of(dtype),
            TOP=format_of(dtype).top_exponent,
            FAST=not dispatch.interpreting(),
        )

    blocked = ["b s f", f"b s f/{size}"]
    results = [*blocked, *blocked, "b s f", f"b s f/{per_maximum}"]
    *parts, codes, maxima = over_rows(run, hidden, ["b s f"] * len(hidden), results)
    kept = (Blocks(*parts[:2]), Blocks(*parts[2:]))
    return kept[: len(hidden)], codes, maxima


def activation_rescale(
    codes: Float[Array, "B S F"],
    maxima: Float[Array, "B S M"],
    scale: Float[Array, ""],
    size: int,
) -> Array:
    """The codes with `scale` in the place of those that follow from the magnitudes."""
    per_maximum = max(size, COLUMNS_PER_MAXIMUM)

    def run(codes: Array, maxima: Array, scale: Array) -> list[Array]:
        *rows, columns = codes.shape
        return launch(
            activation_rescale_tile,
            codes,
            maxima,
            scale,
            outputs=[jax.ShapeDtypeStruct(codes.shape, codes.dtype)],
            aliases={},
            **tiles_of(rows, columns, per_maximum, "cast"),
            F8=rounding_of(codes.dtype),
            TOP=format_of(codes.dtype).top_exponent,
            FAST=not dispatch.interpreting(),
        )

    axes = ["b s f", f"b s f/{per_maximum}", ""]
    (result,) = over_rows(run, [codes, maxima, scale], axes, ["b s f"])
    return result


# --- Kernels ---------------------------------------------------------------------------------


@kernel
def activation_forward_exact_tile(
    gate, up, gate_codes, gate_exponents, up_codes, up_exponents, out, maxima,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    SIZE: tl.constexpr, NAME: tl.constexpr, GATED: tl.constexpr, F8: tl.constexpr,
    TOP: tl.constexpr, PER_MAXIMUM: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    row, column = tile_of(COLUMNS, TILE_ROWS, TILE_COLUMNS)
    v = load_tile(gate, row, column, ROWS, COLUMNS)
    a, _ = activation(v, NAME, FAST)
    v = keep_tile(
        v, gate_codes, gate_exponents, row, column,
        ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS, SIZE, F8, TOP, FAST,
    )  # fmt: skip
    again, _ = activation(v, NAME, FAST)
    if GATED:
        v = load_tile(up, row, column, ROWS, COLUMNS)
        a *= v
        again *= keep_tile(
            v, up_codes, up_exponents, row, column,
            ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS, SIZE, F8, TOP, FAST,
        )  # fmt: skip
    largest = tl.maximum(magnitude_bits(a), magnitude_bits(again))
    largest = tl.reshape(largest, [TILE_ROWS, TILE_COLUMNS // PER_MAXIMUM, PER_MAXIMUM])
    largest = tl.max(largest, axis=2)
    at, there = block_places(row, ROWS, COLUMNS, TILE_COLUMNS, PER_MAXIMUM)
    tl.store(maxima + at, largest.to(tl.float32, bitcast=True), mask=there)
    a = tl.reshape(a, [TILE_ROWS, TILE_COLUMNS // PER_MAXIMUM, PER_MAXIMUM])
    a *= inverse_power(fitting_exponent(largest, TOP))[:, :, None]
    q = rounded(tl.reshape(a, [TILE_ROWS, TILE_COLUMNS]), F8[0], F8[1], F8[2], FAST)
    store_straight(q.to(out.dtype.element_ty), out, row, column, ROWS, COLUMNS)


@kernel
def activation_rescale_tile(
    codes, maxima, scale, out,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    SIZE: tl.constexpr, F8: tl.constexpr, TOP: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    row, column = tile_of(COLUMNS, TILE_ROWS, TILE_COLUMNS)
    q = load_tile(codes, row, column, ROWS, COLUMNS)
    at, there = block_places(row, ROWS, COLUMNS, TILE_COLUMNS, SIZE)
    largest = tl.load(maxima + at, mask=there, other=0.0)
    factor = power_of_two(fitting_exponent(magnitude_bits(largest), TOP)) * (1.0 / tl.load(scale))
    q = tl.reshape(q, [TILE_ROWS, TILE_COLUMNS // SIZE, SIZE]) * factor[:, :, None]
    q = rounded(tl.reshape(q, [TILE_ROWS, TILE_COLUMNS]), F8[0], F8[1], F8[2], FAST)
    store_straight(q.to(out.dtype.element_ty), out, row, column, ROWS, COLUMNS)
