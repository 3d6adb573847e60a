"""A norm between FP8 and FP8; the references are in `norm`.

    norm_forward    x -> blocks, statistics, and norm(x) as one FP8 tensor
    norm_cast       blocks, statistics -> norm(x) as one FP8 tensor, transposed
    norm_backward   blocks, statistics, gradient of norm(x) -> gradient of x, of scale and shift

One pass forward: the tensor's scale comes from `norm.bound` and does not wait for the rows. The
backward pass reads one byte an element where the norm's input would be two, and recomputes
norm(x) from it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax.kernels import dispatch
from coat_jax.kernels.cast import rounding_of
from coat_jax.kernels.fp8 import (
    decoded,
    fitting_exponent,
    inverse_power,
    magnitude_bits,
    power_of_two,
    rounded,
    through_fp8,
)
from coat_jax.kernels.launch import kernel, launch
from coat_jax.kernels.norm import Norm, Stats
from coat_jax.kernels.rows import as_rows, over_rows
from coat_jax.kernels.tiles import load_blocks, store_transposed, tile_of, tiles
from coat_jax.numerics.blocks import Blocks
from coat_jax.numerics.formats import format_of

if TYPE_CHECKING:
    import triton.language as tl

WIDEST = 16384  # columns that one program holds
TILE_ROWS, TILE_COLUMNS = 64, 128  # of norm_cast
ROWS_PER_SUM = 32  # rows whose contributions to a norm's parameters one program adds up


def norm_forward(
    x: Float[Array, "*rows D"],
    norm: Norm,
    scale: Float[Array, ""],
    dtype: DTypeLike,
    size: int,
    *,
    exact: bool = False,
) -> tuple[Blocks, Stats, Array]:
    """Blocks of `x`, with rows [B, S]; statistics and norm(x) / scale as FP8 codes.

    Both are of what the blocks stand for, or of `x` itself where `exact`.
    """
    x = as_rows(x)
    require_width(x.shape[-1])
    layer = norm.kind == "layer"

    def run(x: Array, tensor_scale: Array, *parameters: Array) -> list[Array]:
        *rows, columns = x.shape
        codes = jax.ShapeDtypeStruct(x.shape, dtype)
        numbers = jax.ShapeDtypeStruct((*rows, 1), jnp.float32)
        exponents = jax.ShapeDtypeStruct((*rows, -(-columns // size)), jnp.uint8)
        return launch(
            norm_forward_row,
            x,
            tensor_scale,
            *_parameters(norm, parameters, x),
            outputs=[codes, exponents, numbers, numbers, codes],
            aliases={},
            programs=math.prod(rows),
            warps=min(_warps(columns), 8),
            COLUMNS=columns,
            WIDTH=_width(columns, size),
            SIZE=size,
            LAYER=layer,
            HAS_SCALE=norm.scale is not None,
            HAS_SHIFT=norm.shift is not None,
            EPS=norm.eps,
            EXACT=exact,
            F8=rounding_of(dtype),
            TOP=format_of(dtype).top_exponent,
            FAST=not dispatch.interpreting(),
        )

    given = _given(norm)
    row, number = "b s !d", "b s !one"
    codes, exponents, inverse, mean, normed = over_rows(
        run,
        [x, scale, *given],
        [row, "", *["!d"] * len(given)],
        [row, f"b s !d/{size}", number, number, row],
    )
    return Blocks(codes, exponents), Stats(mean if layer else None, inverse), normed


def norm_cast(
    blocks: Blocks, stats: Stats, norm: Norm, scale: Float[Array, ""], size: int
) -> Array:
    """norm(x) / scale as FP8 codes [D, B, S], in the format of the blocks."""
    given = _given(norm)
    moments = [stats.inverse] if stats.mean is None else [stats.inverse, stats.mean]

    def run(codes: Array, exponents: Array, tensor_scale: Array, *rest: Array) -> list[Array]:
        *rows, columns = codes.shape
        count = len(moments)
        inverse, mean = rest[0], rest[count - 1]
        tile_columns = max(TILE_COLUMNS, size)
        return launch(
            norm_cast_tile,
            codes,
            exponents,
            tensor_scale,
            inverse,
            mean,
            *_parameters(norm, rest[count:], codes),
            outputs=[jax.ShapeDtypeStruct((columns, *rows), codes.dtype)],
            aliases={},
            programs=tiles(math.prod(rows), columns, TILE_ROWS, tile_columns),
            warps=4,
            ROWS=math.prod(rows),
            COLUMNS=columns,
            SIZE=size,
            LAYER=count == 2,
            HAS_SCALE=norm.scale is not None,
            HAS_SHIFT=norm.shift is not None,
            TILE_ROWS=TILE_ROWS,
            TILE_COLUMNS=tile_columns,
            F8=rounding_of(codes.dtype),
            FAST=not dispatch.interpreting(),
        )

    (result,) = over_rows(
        run,
        [blocks.codes, blocks.exponents, scale, *moments, *given],
        ["b s d", f"b s d/{size}", "", *["b s !one"] * len(moments), *["d"] * len(given)],
        ["d b s"],
    )
    return result


def norm_backward(
    blocks: Blocks,
    stats: Stats,
    norm: Norm,
    dn: Float[Array, "B S D"],
    residual: Float[Array, "B S D"] | None,
    size: int,
) -> tuple[Float[Array, "B S D"], Norm]:
    """The gradient of x, in dn's dtype, and those of what the norm learns.

    Args:
        blocks: what was kept of x.
        stats: its statistics.
        norm: the norm.
        dn: the gradient of norm(x).
        residual: added to the gradient of x, or None.
        size: of the blocks.
    """
    moments = [stats.inverse] if stats.mean is None else [stats.inverse, stats.mean]
    extra = [] if residual is None else [residual]
    scale = [] if norm.scale is None else [norm.scale]
    learned = [p for p in (norm.scale, norm.shift) if p is not None]
    sums = math.gcd(blocks.codes.shape[1], ROWS_PER_SUM)

    def run(codes: Array, exponents: Array, dn: Array, *rest: Array) -> list[Array]:
        *rows, columns = codes.shape
        moment, rest = rest[: len(moments)], rest[len(moments) :]
        partial = jax.ShapeDtypeStruct((rows[0], rows[1] // sums, columns), jnp.float32)
        return launch(
            NORM_BACKWARD[len(learned)],
            codes,
            exponents,
            dn,
            moment[0],
            moment[-1],
            rest[0] if extra else dn,
            rest[-1] if scale else dn,
            outputs=[jax.ShapeDtypeStruct(codes.shape, dn.dtype), *[partial] * len(learned)],
            aliases={},
            programs=math.prod(rows) // sums,
            warps=_warps(columns),
            COLUMNS=columns,
            WIDTH=_width(columns, size),
            SIZE=size,
            SUMS=sums,
            RESIDUAL=bool(extra),
            LAYER=len(moments) == 2,
            HAS_SCALE=norm.scale is not None,
            HAS_SHIFT=norm.shift is not None,
        )

    rows = "b s !d"
    dx, *sums_of_rows = over_rows(
        run,
        [blocks.codes, blocks.exponents, dn, *moments, *extra, *scale],
        [
            rows,
            f"b s !d/{size}",
            rows,
            *["b s !one"] * len(moments),
            *[rows] * len(extra),
            *["!d"] * len(scale),
        ],
        [rows, *[f"b s/{sums} !d"] * len(learned)],
    )
    gradients = [
        jnp.sum(part, axis=(0, 1)).astype(parameter.dtype)
        for parameter, part in zip(learned, sums_of_rows, strict=True)
    ]
    d_scale = None if norm.scale is None else gradients[0]
    d_shift = None if norm.shift is None else gradients[-1]
    return dx, dataclasses.replace(norm, scale=d_scale, shift=d_shift)


def require_width(columns: int) -> None:
    """Raises where a row is too wide for one program."""
    if columns > WIDEST:
        raise ValueError(
            f"The norm kernel holds rows of up to {WIDEST} columns, not {columns}. Use "
            'implementation="xla".'
        )


def _given(norm: Norm) -> list[Array]:
    return [p for p in (norm.scale, norm.shift) if p is not None]


def _parameters(norm: Norm, given: Sequence[Array], other: Array) -> list[Array]:
    """Scale and shift for a kernel, which wants a pointer even where there is nothing."""
    rest = iter(given)
    return [other if p is None else next(rest) for p in (norm.scale, norm.shift)]


def _width(columns: int, size: int) -> int:
    """Columns as a power of two, which Triton's blocks need."""
    return max(1 << (columns - 1).bit_length(), size)


def _warps(columns: int) -> int:
    """About 8 columns per thread."""
    return min(max(_width(columns, 1) // 256, 1), 16)


# --- Kernels ---------------------------------------------------------------------------------


@kernel
def norm_forward_row(
    x, tensor_scale, scale, shift, codes, exponents, inverse, mean, normed,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, LAYER: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_SHIFT: tl.constexpr, EPS: tl.constexpr, EXACT: tl.constexpr,
    F8: tl.constexpr, TOP: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    here = lane < COLUMNS
    block = tl.arange(0, WIDTH // SIZE)
    blocks: tl.constexpr = (COLUMNS + SIZE - 1) // SIZE

    # What is kept.
    v = tl.load(x + row * COLUMNS + lane, mask=here, other=0.0).to(tl.float32)
    v = tl.reshape(v, [WIDTH // SIZE, SIZE])
    e = fitting_exponent(tl.max(magnitude_bits(v), axis=1), TOP)
    q = rounded(v * inverse_power(e)[:, None], F8[0], F8[1], F8[2], FAST)
    flat = tl.reshape(q, [WIDTH])
    tl.store(codes + row * COLUMNS + lane, flat.to(codes.dtype.element_ty), mask=here)
    tl.store(exponents + row * blocks + block, e.to(tl.uint8), mask=block < blocks)

    # The norm of what is kept, or of x.
    if not EXACT:
        v = through_fp8(q, codes.dtype.element_ty, FAST) * power_of_two(e)[:, None]
    v = tl.reshape(v, [WIDTH])
    if LAYER:
        center = tl.sum(v, axis=0) / COLUMNS
        tl.store(mean + row, center)
        v = tl.where(here, v - center, 0.0)
    factor = 1.0 / tl.sqrt(tl.sum(v * v, axis=0) / COLUMNS + EPS)
    tl.store(inverse + row, factor)
    v = v * factor
    if HAS_SCALE:
        v = v * tl.load(scale + lane, mask=here, other=0.0).to(tl.float32)
    if HAS_SHIFT:
        v = v + tl.load(shift + lane, mask=here, other=0.0).to(tl.float32)
    v = rounded(v * (1.0 / tl.load(tensor_scale)), F8[0], F8[1], F8[2], FAST)
    tl.store(normed + row * COLUMNS + lane, v.to(normed.dtype.element_ty), mask=here)


@kernel
def norm_cast_tile(
    codes, exponents, tensor_scale, inverse, mean, scale, shift, out,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr, LAYER: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_SHIFT: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, F8: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    row, column = tile_of(COLUMNS, TILE_ROWS, TILE_COLUMNS)
    v = load_blocks(codes, exponents, row, column, ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS, SIZE)
    if LAYER:
        v = v - tl.load(mean + row, mask=row < ROWS, other=0.0)[:, None]
    v = v * tl.load(inverse + row, mask=row < ROWS, other=0.0)[:, None]
    if HAS_SCALE:
        v = v * tl.load(scale + column, mask=column < COLUMNS, other=0.0).to(tl.float32)[None, :]
    if HAS_SHIFT:
        v = v + tl.load(shift + column, mask=column < COLUMNS, other=0.0).to(tl.float32)[None, :]
    q = rounded(v * (1.0 / tl.load(tensor_scale)), F8[0], F8[1], F8[2], FAST).to(
        out.dtype.element_ty
    )
    store_transposed(q, out, row, column, ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS)


@kernel
def norm_backward_rows(
    codes, exponents, dn, inverse, mean, residual, scale, dx, d_scale, d_shift,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, SUMS: tl.constexpr,
    RESIDUAL: tl.constexpr, LAYER: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_SHIFT: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, WIDTH)
    here = lane < COLUMNS
    for_scale = tl.zeros([WIDTH], tl.float32)
    for_shift = tl.zeros([WIDTH], tl.float32)
    if HAS_SCALE:
        weight = tl.load(scale + lane, mask=here, other=0.0).to(tl.float32)
    program = tl.program_id(0).to(tl.int64)
    for i in range(SUMS):
        row = program * SUMS + i
        at = row * COLUMNS + lane
        unit = decoded(codes, exponents, row, lane, COLUMNS, WIDTH, SIZE)
        if LAYER:
            unit = tl.where(here, unit - tl.load(mean + row), 0.0)
        factor = tl.load(inverse + row)
        unit = unit * factor
        d = tl.load(dn + at, mask=here, other=0.0).to(tl.float32)
        if RESIDUAL:  # loaded before the sums, for which all threads wait
            beside = tl.load(residual + at, mask=here, other=0.0).to(tl.float32)
        if HAS_SHIFT:
            for_shift += d
        if HAS_SCALE:
            for_scale += d * unit
            d = d * weight
        result = d - unit * (tl.sum(d * unit, axis=0) / COLUMNS)
        if LAYER:
            result = result - tl.sum(d, axis=0) / COLUMNS
        result = result * factor
        if RESIDUAL:
            result += beside
        tl.store(dx + at, result.to(dx.dtype.element_ty), mask=here)
    at = program * COLUMNS + lane
    if HAS_SCALE:
        tl.store(d_scale + at, for_scale, mask=here)
    if HAS_SHIFT:
        tl.store(d_shift + at, for_shift, mask=here)


@kernel
def norm_backward_rows_one(
    codes, exponents, dn, inverse, mean, residual, scale, dx, learned,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, SUMS: tl.constexpr,
    RESIDUAL: tl.constexpr, LAYER: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_SHIFT: tl.constexpr,
):  # fmt: skip
    """Where the norm learns one thing."""
    norm_backward_rows(
        codes, exponents, dn, inverse, mean, residual, scale, dx, learned, learned,
        COLUMNS, WIDTH, SIZE, SUMS, RESIDUAL, LAYER, HAS_SCALE, HAS_SHIFT,
    )  # fmt: skip


@kernel
def norm_backward_rows_none(
    codes, exponents, dn, inverse, mean, residual, scale, dx,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, SUMS: tl.constexpr,
    RESIDUAL: tl.constexpr, LAYER: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_SHIFT: tl.constexpr,
):  # fmt: skip
    """Where it learns nothing."""
    norm_backward_rows(
        codes, exponents, dn, inverse, mean, residual, scale, dx, dx, dx,
        COLUMNS, WIDTH, SIZE, SUMS, RESIDUAL, LAYER, HAS_SCALE, HAS_SHIFT,
    )  # fmt: skip


NORM_BACKWARD = (norm_backward_rows_none, norm_backward_rows_one, norm_backward_rows)
