"""A norm between FP8 and FP8, in three passes over memory; the references are in `norm`.

    norm_forward    x -> blocks, statistics, and the largest magnitude of each row of norm(x)
    norm_cast       blocks, statistics -> norm(x) as one FP8 tensor, straight or transposed
    norm_backward   blocks, statistics, gradients of norm(x) -> gradient of x, of scale and shift

The tensor's scale needs the maximum over all rows, hence two passes forward. The backward pass
reads one byte an element where the norm's input would be two, and recomputes norm(x) from it.
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

from coat_jax.blocks import Blocks
from coat_jax.formats import format_of
from coat_jax.kernels import dispatch
from coat_jax.kernels.cast import (
    TILE_COLUMNS,
    TILE_ROWS,
    Layout,
    rounding_of,
    store_codes,
    tile_of,
    tiles,
)
from coat_jax.kernels.fp8 import (
    decoded,
    decoded_tile,
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

if TYPE_CHECKING:
    import triton.language as tl

WIDEST = 16384  # columns that one program holds
ROWS_PER_SUM = 32  # rows whose contributions to a norm's parameters one program adds up
MAX_GRADIENTS = 3


def norm_forward(
    x: Float[Array, "*rows D"], norm: Norm, dtype: DTypeLike, size: int
) -> tuple[Blocks, Stats, Float[Array, "B S"]]:
    """Blocks and statistics of `x`, with rows [B, S]; and the largest of each row of norm(x)."""
    x = as_rows(x)
    require_width(x.shape[-1])
    layer = norm.kind == "layer"

    def run(x: Array, *parameters: Array) -> list[Array]:
        *rows, columns = x.shape
        numbers = jax.ShapeDtypeStruct((*rows, 1), jnp.float32)
        outputs = [
            jax.ShapeDtypeStruct(x.shape, dtype),
            jax.ShapeDtypeStruct((*rows, -(-columns // size)), jnp.uint8),
            numbers,
            jax.ShapeDtypeStruct(tuple(rows), jnp.float32),
            numbers,
        ]
        return launch(
            norm_forward_row,
            x,
            *_parameters(norm, parameters, x),
            outputs=outputs,
            aliases={},
            programs=math.prod(rows),
            warps=_warps(columns),
            COLUMNS=columns,
            WIDTH=_width(columns, size),
            SIZE=size,
            LAYER=layer,
            HAS_SCALE=norm.scale is not None,
            HAS_SHIFT=norm.shift is not None,
            EPS=norm.eps,
            F8=rounding_of(dtype),
            TOP=format_of(dtype).top_exponent,
            FAST=not dispatch.interpreting(),
        )

    given = _given(norm)
    blocked = f"b s !d/{size}"
    codes, exponents, inverse, amax, mean = over_rows(
        run,
        [x, *given],
        ["b s !d", *["!d"] * len(given)],
        ["b s !d", blocked, "b s !one", "b s", "b s !one"],
    )
    return Blocks(codes, exponents), Stats(mean if layer else None, inverse), amax


def norm_cast(
    blocks: Blocks, stats: Stats, norm: Norm, scale: Float[Array, ""], size: int, layout: Layout
) -> Array:
    """norm(x) / scale as FP8 codes, in the format of the blocks: [B, S, D] or [D, B, S]."""
    given = _given(norm)
    moments = [stats.inverse] if stats.mean is None else [stats.inverse, stats.mean]
    axes = "b s d" if layout == "straight" else "d b s"

    def run(codes: Array, exponents: Array, tensor_scale: Array, *rest: Array) -> list[Array]:
        *rows, columns = codes.shape
        shape = codes.shape if layout == "straight" else (columns, *rows)
        count = len(moments)
        inverse, mean = rest[0], rest[count - 1]
        return launch(
            norm_cast_tile,
            codes,
            exponents,
            tensor_scale,
            inverse,
            mean,
            *_parameters(norm, rest[count:], codes),
            outputs=[jax.ShapeDtypeStruct(shape, codes.dtype)],
            aliases={},
            programs=tiles(math.prod(rows), columns),
            warps=4,
            ROWS=math.prod(rows),
            COLUMNS=columns,
            SIZE=size,
            LAYER=count == 2,
            HAS_SCALE=norm.scale is not None,
            HAS_SHIFT=norm.shift is not None,
            TRANSPOSED=layout == "transposed",
            TILE_ROWS=TILE_ROWS,
            TILE_COLUMNS=max(TILE_COLUMNS, size),
            F8=rounding_of(codes.dtype),
            FAST=not dispatch.interpreting(),
        )

    (result,) = over_rows(
        run,
        [blocks.codes, blocks.exponents, scale, *moments, *given],
        ["b s d", f"b s d/{size}", "", *["b s !one"] * len(moments), *["d"] * len(given)],
        [axes],
    )
    return result


def norm_backward(
    blocks: Blocks,
    stats: Stats,
    norm: Norm,
    gradients: Sequence[Float[Array, "B S D"]],
    residual: Float[Array, "B S D"] | None,
    size: int,
    dtype: DTypeLike,
) -> tuple[Float[Array, "B S D"], Norm]:
    """The gradient of x, the residual's added, and those of what the norm learns.

    Args:
        blocks: what was kept of x.
        stats: its statistics.
        norm: the norm.
        gradients: up to three, whose sum is the gradient of norm(x).
        residual: added to the result, or None.
        size: of the blocks.
        dtype: of the result.
    """
    if not 1 <= len(gradients) <= MAX_GRADIENTS:
        raise ValueError(f"norm_backward adds up 1 to {MAX_GRADIENTS} gradients.")
    given = [] if norm.scale is None else [norm.scale]
    moments = [stats.inverse] if stats.mean is None else [stats.inverse, stats.mean]
    extra = [] if residual is None else [residual]
    learns = norm.scale is not None, norm.shift is not None
    sums = math.gcd(blocks.codes.shape[1], ROWS_PER_SUM)

    def run(codes: Array, exponents: Array, *rest: Array) -> list[Array]:
        *rows, columns = codes.shape
        moment, rest = rest[: len(moments)], rest[len(moments) :]
        dy, rest = rest[: len(gradients)], rest[len(gradients) :]
        added = rest[0] if extra else dy[0]
        partial = jax.ShapeDtypeStruct((rows[0], rows[1] // sums, columns), jnp.float32)
        return launch(
            norm_backward_rows,
            codes,
            exponents,
            moment[0],
            moment[-1],
            *(dy[min(i, len(dy) - 1)] for i in range(MAX_GRADIENTS)),
            added,
            rest[-1] if given else moment[0],
            outputs=[jax.ShapeDtypeStruct(codes.shape, dtype), *[partial] * 2],
            aliases={},
            programs=math.prod(rows) // sums,
            warps=_warps(columns),
            COLUMNS=columns,
            WIDTH=_width(columns, size),
            SIZE=size,
            SUMS=sums,
            GRADIENTS=len(gradients),
            RESIDUAL=bool(extra),
            LAYER=len(moments) == 2,
            HAS_SCALE=learns[0],
            HAS_SHIFT=learns[1],
        )

    rows = "b s !d"
    sharded = f"b s/{sums} !d"
    dx, d_scale, d_shift = over_rows(
        run,
        [blocks.codes, blocks.exponents, *moments, *gradients, *extra, *given],
        [
            rows,
            f"b s !d/{size}",
            *["b s !one"] * len(moments),
            *[rows] * (len(gradients) + len(extra)),
            *["!d"] * len(given),
        ],
        [rows, sharded, sharded],
    )
    summed = [
        None if parameter is None else jnp.sum(part, axis=(0, 1)).astype(parameter.dtype)
        for parameter, part in ((norm.scale, d_scale), (norm.shift, d_shift))
    ]
    return dx, dataclasses.replace(norm, scale=summed[0], shift=summed[1])


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
    """About 16 columns per thread."""
    return min(max(_width(columns, 1) // 512, 1), 16)


# --- Kernels ---------------------------------------------------------------------------------


@kernel
def norm_forward_row(
    x, scale, shift, codes, exponents, inverse, amax, mean,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, LAYER: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_SHIFT: tl.constexpr, EPS: tl.constexpr, F8: tl.constexpr,
    TOP: tl.constexpr, FAST: tl.constexpr,
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

    # The norm of what is kept.
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
    largest = tl.max(tl.where(here, magnitude_bits(v), 0), axis=0)
    tl.store(amax + row, largest.to(tl.float32, bitcast=True))


@kernel
def norm_cast_tile(
    codes, exponents, tensor_scale, inverse, mean, scale, shift, out,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr, LAYER: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_SHIFT: tl.constexpr, TRANSPOSED: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, F8: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    row, column = tile_of(ROWS, COLUMNS, TILE_ROWS, TILE_COLUMNS)
    v = decoded_tile(codes, exponents, row, column, ROWS, COLUMNS, SIZE, TILE_ROWS, TILE_COLUMNS)
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
    store_codes(q, out, out, row, column, ROWS, COLUMNS, not TRANSPOSED, TRANSPOSED)


@kernel
def norm_backward_rows(
    codes, exponents, inverse, mean, dy0, dy1, dy2, residual, scale, dx, d_scale, d_shift,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, SUMS: tl.constexpr,
    GRADIENTS: tl.constexpr, RESIDUAL: tl.constexpr, LAYER: tl.constexpr, HAS_SCALE: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
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
        dy = tl.load(dy0 + at, mask=here, other=0.0).to(tl.float32)
        if GRADIENTS > 1:
            dy += tl.load(dy1 + at, mask=here, other=0.0).to(tl.float32)
        if GRADIENTS > 2:
            dy += tl.load(dy2 + at, mask=here, other=0.0).to(tl.float32)
        if HAS_SHIFT:
            for_shift += dy
        if HAS_SCALE:
            for_scale += dy * unit
            dy = dy * weight
        result = dy - unit * (tl.sum(dy * unit, axis=0) / COLUMNS)
        if LAYER:
            result = result - tl.sum(dy, axis=0) / COLUMNS
        result = result * factor
        if RESIDUAL:
            result += tl.load(residual + at, mask=here, other=0.0).to(tl.float32)
        tl.store(dx + at, result.to(dx.dtype.element_ty), mask=here)
    at = program * COLUMNS + lane
    tl.store(d_scale + at, for_scale, mask=here)
    tl.store(d_shift + at, for_shift, mask=here)
