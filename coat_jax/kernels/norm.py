"""Normalization of rows, and its gradient.

    rms     y = x / sqrt(mean(x^2) + eps) * scale
    layer   y = (x - mean(x)) / sqrt(var(x) + eps) * scale + shift

`statistics`, `normalize` and `normalize_backward` are the references, in FP32. Besides its input,
the gradient needs `Stats`: one or two numbers per row. The kernels go from FP8 to FP8:

    norm_forward    x -> blocks, statistics, norm(x) as one FP8 tensor, or as rows of INT8
    norm_cast       blocks, statistics -> norm(x) as one FP8 tensor, transposed
    norm_backward   blocks, statistics, gradient of norm(x) -> gradients of x, scale and shift

The forward pass reads x once: the tensor's scale comes from `bound_of_norm`, so it need not wait
for all rows. The backward pass recomputes norm(x) from the blocks, which have half the bytes of x.
"""

import dataclasses
import math
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax.kernels.launch import Tile, divide
from coat_jax.kernels.sharding import as_3d, launch_sharded
from coat_jax.numerics.blocks import Blocks, block_numbers
from coat_jax.numerics.formats import format_of
from coat_jax.numerics.noise import NoiseStream, element_numbers
from coat_jax.precision import ForwardProducts

NormKind = Literal["rms", "layer"]
KINDS = ("rms", "layer")
WIDEST = 16384  # columns that one program of a kernel holds
CAST = Tile(64, 128, 4)  # of norm_cast
ROWS_PER_SUM = 32  # rows over which one program sums the gradients of scale and shift


class Stats(NamedTuple):
    """Per row: the mean and 1 / standard deviation; for "rms", None and 1 / root mean square."""

    mean: Float[Array, "*rows 1"] | None
    inverse: Float[Array, "*rows 1"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Norm:
    """A norm: its parameters, and how it is computed.

    Attributes:
        scale: [D], or None for a norm without one.
        shift: [D], or None; only of kind "layer".
        kind: "rms" or "layer".
        eps: added to the mean square, or to the variance. Where FP8 products follow, some row of x
            should have an rms above 2^-13 sqrt(eps D): 8e-6 for D = 4096 and the default. If all
            are smaller, norm(x) loses precision, down to zero; `linear(norm(x))` does not.
    """

    scale: Float[Array, " D"] | None = None
    shift: Float[Array, " D"] | None = None
    kind: NormKind = dataclasses.field(default="rms", metadata={"static": True})
    eps: float = dataclasses.field(default=1e-6, metadata={"static": True})

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} must be one of {KINDS}.")
        if not 0 <= self.eps < math.inf:
            raise ValueError(f"eps={self.eps} must be at least 0, and finite.")
        # JAX fills trees with placeholders, even in place of None: only arrays are checked.
        if self.kind == "rms" and hasattr(self.shift, "shape"):
            raise ValueError('A norm of kind "rms" has no shift. Use kind="layer".')


def statistics(x: Float[Array, "*rows D"], norm: Norm) -> Stats:
    """The statistics of each row, in FP32."""
    x = x.astype(jnp.float32)
    mean = None
    if norm.kind == "layer":
        mean = jnp.mean(x, axis=-1, keepdims=True)
        x = x - mean
    return Stats(mean, lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + norm.eps))


def normalize(x: Float[Array, "*rows D"], stats: Stats, norm: Norm) -> Float[Array, "*rows D"]:
    """The norm of `x`, in FP32."""
    y = x.astype(jnp.float32)
    y = (y if stats.mean is None else y - stats.mean) * stats.inverse
    if norm.scale is not None:
        y = y * jnp.broadcast_to(norm.scale.astype(jnp.float32), y.shape)
    if norm.shift is not None:
        y = y + jnp.broadcast_to(norm.shift.astype(jnp.float32), y.shape)
    return y


def normalize_backward(
    x: Float[Array, "*rows D"], stats: Stats, norm: Norm, dy: Float[Array, "*rows D"]
) -> tuple[Float[Array, "*rows D"], Norm]:
    """The gradients of `x`, in FP32, and of the norm's parameters."""
    dy = dy.astype(jnp.float32)
    unit = normalize(x, stats, dataclasses.replace(norm, scale=None, shift=None))
    rows = tuple(range(x.ndim - 1))
    d_scale = d_shift = None
    if norm.shift is not None:
        d_shift = jnp.sum(dy, axis=rows).astype(norm.shift.dtype)
    d_unit = dy
    if norm.scale is not None:
        d_scale = jnp.sum(dy * unit, axis=rows).astype(norm.scale.dtype)
        d_unit = dy * jnp.broadcast_to(norm.scale.astype(jnp.float32), dy.shape)
    dx = d_unit - unit * jnp.mean(d_unit * unit, axis=-1, keepdims=True)
    if stats.mean is not None:
        dx = dx - jnp.mean(d_unit, axis=-1, keepdims=True)
    return dx * stats.inverse, dataclasses.replace(norm, scale=d_scale, shift=d_shift)


def bound_of_norm(norm: Norm, columns: int, rounding: float = 0.0) -> Float[Array, ""]:
    """An upper bound of |norm(x)|, whatever the row x.

    An element's square is at most the row's sum of squares: |y| <= sqrt(columns) |scale| + |shift|.
    With `rounding`, a layer norm of a row whose mean is far larger than its deviation may exceed
    this. It is then dominated by the rounding error, and saturates.

    Args:
        norm: the norm.
        columns: of a row.
        rounding: the largest relative error of x, if the statistics are of unrounded values.
    """
    largest = (1 + rounding) * jnp.sqrt(jnp.float32(columns))
    if norm.scale is not None:
        largest = largest * jnp.max(jnp.abs(norm.scale)).astype(jnp.float32)
    if norm.shift is not None:
        largest = largest + jnp.max(jnp.abs(norm.shift)).astype(jnp.float32)
    return largest


# --- Kernels ---------------------------------------------------------------------------------


class Constants(NamedTuple):
    """The constants of the kernels."""

    columns: int
    width: int  # of a program's row: a power of two
    block: int  # the size of the saved blocks
    layer: bool
    has_scale: bool
    has_shift: bool
    eps: float
    exact: bool = False  # whether the norm is of x itself, not of its blocks
    stochastic: bool = False
    residual: bool = False
    sums: int = 1  # rows that a program sums over


def norm_forward(
    x: Float[Array, "*rows D"],
    norm: Norm,
    scale: Float[Array, ""],
    dtype: DTypeLike,
    size: int,
    *,
    exact: bool = False,
    stochastic: bool = False,
    products: ForwardProducts = "fp8",
) -> tuple[Blocks, Stats, Array, Float[Array, "B S"] | None]:
    """Blocks of `x`, with rows [B, S]; its statistics; and norm(x) as an operand of products.

    Statistics and norm are of the values that the blocks decode to, or of `x` itself if `exact`.
    The blocks are rounded to nearest, or like `to_blocks(stochastic=True)`. The operand is norm(x)
    / scale as FP8 codes; or those of `int8.round_rows`, whose largest magnitudes are the last
    result; or, if products are in "bf16", norm(x) in the dtype of x.
    """
    from coat_jax.kernels.triton.norm import norm_forward_row, norm_forward_row_int8

    x = as_3d(x)
    if x.shape[-1] > WIDEST:
        raise ValueError(
            f"The norm kernel holds rows of up to {WIDEST} columns, not {x.shape[-1]}. Use "
            'implementation="xla".'
        )

    row, number = "b s !d", ("b s !one", jnp.float32)
    in_int8, used = products == "int8", {"fp8": dtype, "int8": jnp.int8, "bf16": x.dtype}[products]
    numbers = block_numbers(x.shape, size).first if stochastic else None
    constants = constants_of(norm, x.shape[-1], size)._replace(exact=exact, stochastic=stochastic)
    codes, exponents, inverse, mean, normalized, *largest = launch_sharded(
        norm_forward_row_int8 if in_int8 else norm_forward_row,
        [(x, row), (numbers, "b s"), *[(scale, "")] * (not in_int8), *_parameters(norm, "!d")],
        [
            *((row, dtype), (f"{row}/{size}", jnp.uint8), number, number),
            *((row, used), *[number] * in_int8),
        ],
        partial(_rows, warps=min(warps_of(x.shape[-1]), 8)),
        NORM=constants,
        F8=format_of(dtype),
    )
    stats = Stats(mean if norm.kind == "layer" else None, inverse)
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

    dtype = blocks.codes.dtype
    rows, columns = (None,) * 2 if stream is None else element_numbers(blocks.codes.shape, stream)
    constants = constants_of(norm, blocks.codes.shape[-1], size)
    (result,) = launch_sharded(
        norm_cast_tile,
        [
            *((blocks.codes, "b s d"), (blocks.exponents, f"b s d/{size}"), (scale, "")),
            *((stats.inverse, "b s !one"), (stats.mean, "b s !one")),
            *((rows, "b s"), (columns, "d"), *_parameters(norm, "d")),
        ],
        [("d b s", dtype)],
        partial(divide, tile=CAST, block=size),
        NORM=constants._replace(stochastic=stream is not None),
        F8=format_of(dtype),
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

    columns = blocks.codes.shape[-1]
    learned = [p for p in (norm.scale, norm.shift) if p is not None]
    sums = math.gcd(blocks.codes.shape[1], ROWS_PER_SUM)
    constants = constants_of(norm, columns, size)
    row, number = "b s !d", "b s !one"
    dx, *sums_of_rows = launch_sharded(
        NORM_BACKWARD[len(learned)],
        [
            *((blocks.codes, row), (blocks.exponents, f"{row}/{size}"), (dn, row)),
            *((stats.inverse, number), (stats.mean, number), (residual, row), (norm.scale, "!d")),
        ],
        [(row, dn.dtype), *[(f"b s/{sums} !d", jnp.float32)] * len(learned)],
        partial(_rows, per_program=sums, warps=warps_of(columns)),
        NORM=constants._replace(residual=residual is not None, sums=sums),
    )
    gradients = [
        jnp.sum(part, axis=(0, 1)).astype(parameter.dtype)
        for parameter, part in zip(learned, sums_of_rows, strict=True)
    ]
    d_scale = None if norm.scale is None else gradients[0]
    d_shift = None if norm.shift is None else gradients[-1]
    return dx, dataclasses.replace(norm, scale=d_scale, shift=d_shift)


def constants_of(norm: Norm, columns: int, size: int) -> Constants:
    """The constants of kernels with rows of so many columns, in blocks of this size."""
    has = norm.scale is not None, norm.shift is not None
    layer = norm.kind == "layer"
    return Constants(columns, max(padded_width(columns), size), size, layer, *has, norm.eps)


def _parameters(norm: Norm, axes: str) -> list[tuple[Array | None, str]]:
    return [(norm.scale, axes), (norm.shift, axes)]


def _rows(x: Array, *others: Array, warps: int, per_program: int = 1) -> dict[str, Any]:
    """The arguments of `launch` for programs that hold whole rows."""
    del others
    return {"programs": math.prod(x.shape[:-1]) // per_program, "warps": warps}


def padded_width(columns: int) -> int:
    """The next power of two, because the sizes of Triton's arrays must be powers of two."""
    return 1 << (columns - 1).bit_length()


def warps_of(columns: int) -> int:
    """About 8 columns per thread."""
    return min(max(padded_width(columns) // 256, 1), 16)
