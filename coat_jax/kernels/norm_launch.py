"""Launches the kernels of norms, which go from FP8 to FP8.

    norm_forward    x -> blocks, statistics, norm(x) as one FP8 tensor, or as rows of INT8
    norm_cast       blocks, statistics -> norm(x) as one FP8 tensor, transposed
    norm_backward   blocks, statistics, gradient of norm(x) -> gradients of x, scale and shift

The forward pass reads x once: the tensor's scale comes from `norm.bound_of_norm`, so it need not
wait for all rows. The backward pass recomputes norm(x) from the blocks, which have half the bytes
of x. The equations, and the references, are in `norm`.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax.kernels import dispatch
from coat_jax.kernels.launch import launch, tile_count
from coat_jax.kernels.norm import Norm, Stats
from coat_jax.kernels.sharding import as_3d, run_sharded
from coat_jax.numerics.blocks import Blocks, block_numbers
from coat_jax.numerics.formats import format_of
from coat_jax.numerics.noise import NoiseStream, element_numbers

WIDEST = 16384  # columns that one program of a kernel holds
TILE_ROWS, TILE_COLUMNS = 64, 128  # of norm_cast
ROWS_PER_SUM = 32  # rows over which one program sums the gradients of scale and shift


def norm_forward(
    x: Float[Array, "*rows D"],
    norm: Norm,
    scale: Float[Array, ""],
    dtype: DTypeLike,
    size: int,
    *,
    exact: bool = False,
    stochastic: bool = False,
    in_int8: bool = False,
) -> tuple[Blocks, Stats, Array, Float[Array, "B S"] | None]:
    """Blocks of `x`, with rows [B, S]; its statistics; and norm(x) / scale as FP8 codes.

    Statistics and norm are of the values that the blocks decode to, or of `x` itself if `exact`.
    The blocks are rounded to nearest, or like `to_blocks(stochastic=True)`. With `in_int8` the
    codes are those of `int8.round_rows`, whose largest magnitudes are the last result; `scale` is
    not used.
    """
    from coat_jax.kernels.triton.norm import norm_forward_row, norm_forward_row_int8

    x = as_3d(x)
    require_width(x.shape[-1])
    layer = norm.kind == "layer"

    def run(x: Array, tensor_scale: Array, *rest: Array) -> list[Array]:
        *rows, columns = x.shape
        first_numbers, parameters = (rest[0], rest[1:]) if stochastic else (x, rest)
        codes = jax.ShapeDtypeStruct(x.shape, dtype)
        numbers = jax.ShapeDtypeStruct((*rows, 1), jnp.float32)
        exponents = jax.ShapeDtypeStruct((*rows, -(-columns // size)), jnp.uint8)
        normalized = jax.ShapeDtypeStruct(x.shape, jnp.int8) if in_int8 else codes
        return launch(
            norm_forward_row_int8 if in_int8 else norm_forward_row,
            x,
            first_numbers,
            *([] if in_int8 else [tensor_scale]),
            *_parameters(norm, parameters, x),
            outputs=[codes, exponents, numbers, numbers, normalized, *[numbers] * in_int8],
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
            STOCHASTIC=stochastic,
            F8=format_of(dtype),
            FAST=not dispatch.interpreting(),
        )

    given = _given(norm)
    numbers = [block_numbers(x.shape, size).first] if stochastic else []
    row, number = "b s !d", "b s !one"
    codes, exponents, inverse, mean, normalized, *largest = run_sharded(
        run,
        [x, scale, *numbers, *given],
        [row, "", *["b s"] * len(numbers), *["!d"] * len(given)],
        [row, f"b s !d/{size}", number, number, row, *[number] * in_int8],
    )
    stats = Stats(mean if layer else None, inverse)
    return Blocks(codes, exponents), stats, normalized, largest[0][..., 0] if in_int8 else None


def norm_cast(
    blocks: Blocks,
    stats: Stats,
    norm: Norm,
    scale: Float[Array, ""],
    size: int,
    *,
    stream: NoiseStream | None = None,
) -> Array:
    """norm(x) / scale as FP8 codes [D, B, S], in the format of the blocks; rounded like `cast`."""
    from coat_jax.kernels.triton.norm import norm_cast_tile

    given = _given(norm)
    moments = [stats.inverse] if stats.mean is None else [stats.inverse, stats.mean]
    numbers = () if stream is None else element_numbers(blocks.codes.shape, stream)

    def run(codes: Array, exponents: Array, tensor_scale: Array, *rest: Array) -> list[Array]:
        *rows, columns = codes.shape
        count, end = len(moments), len(moments) + len(numbers)
        inverse, mean = rest[0], rest[count - 1]
        tile_columns = max(TILE_COLUMNS, size)
        return launch(
            norm_cast_tile,
            codes,
            exponents,
            tensor_scale,
            inverse,
            mean,
            *(rest[count:end] or (codes, codes)),
            *_parameters(norm, rest[end:], codes),
            outputs=[jax.ShapeDtypeStruct((columns, *rows), codes.dtype)],
            programs=tile_count(math.prod(rows), columns, TILE_ROWS, tile_columns),
            warps=4,
            ROWS=math.prod(rows),
            COLUMNS=columns,
            SIZE=size,
            LAYER=count == 2,
            HAS_SCALE=norm.scale is not None,
            HAS_SHIFT=norm.shift is not None,
            TILE_ROWS=TILE_ROWS,
            TILE_COLUMNS=tile_columns,
            STOCHASTIC=stream is not None,
            F8=format_of(codes.dtype),
            FAST=not dispatch.interpreting(),
        )

    operands = ["b s d", f"b s d/{size}", "", *["b s !one"] * len(moments)]
    operands += [*["b s", "d"][: len(numbers)], *["d"] * len(given)]
    arrays = [blocks.codes, blocks.exponents, scale, *moments, *numbers, *given]
    (result,) = run_sharded(run, arrays, operands, ["d b s"])
    return result


def norm_backward(
    blocks: Blocks,
    stats: Stats,
    norm: Norm,
    dn: Float[Array, "B S D"],
    residual: Float[Array, "B S D"] | None,
    size: int,
) -> tuple[Float[Array, "B S D"], Norm]:
    """The gradients of x, in dn's dtype, and of the norm's parameters.

    Args:
        blocks: of x, as saved.
        stats: its statistics.
        norm: the norm.
        dn: the gradient of norm(x).
        residual: added to the gradient of x, or None.
        size: of the blocks.
    """
    from coat_jax.kernels.triton.norm import NORM_BACKWARD

    moments = [stats.inverse] if stats.mean is None else [stats.inverse, stats.mean]
    extra = [] if residual is None else [residual]
    scale = [] if norm.scale is None else [norm.scale]
    learned = _given(norm)
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
    dx, *sums_of_rows = run_sharded(
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
    """The parameters that the norm has."""
    return [p for p in (norm.scale, norm.shift) if p is not None]


def _parameters(norm: Norm, given: Sequence[Array], other: Array) -> list[Array]:
    """Scale and shift for a kernel, with `other` for one that the norm does not have."""
    rest = iter(given)
    return [other if p is None else next(rest) for p in (norm.scale, norm.shift)]


def _width(columns: int, size: int) -> int:
    """The next power of two, because the sizes of Triton's arrays must be powers of two."""
    return max(1 << (columns - 1).bit_length(), size)


def _warps(columns: int) -> int:
    """About 8 columns per thread."""
    return min(max(_width(columns, 1) // 256, 1), 16)
