"""Matrix products for a mixture of experts: rows in groups, each with a weight of its own.

    product              y[r] = x[r] w_e                    for every row r of every expert e
    product_transposed   dx[r] = sum_i dy_i[r] w_i,e^T
    outer_product        dw_e = sum over the rows r of e of x[r]^T dy[r]

How many rows an expert has is known only at run time, so a kernel is launched with programs for
the largest possible number of blocks. It reads each token from its place in x. Only the transposed
operands of `outer_product` are sorted in memory (`gather_transposed`): Hopper needs them contiguous
along the rows.

As in `gemm`, an operand has one scale, and a sum of FP8 products loses up to 2^-13 for every 32 of
them.
"""

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax.kernels import dispatch
from coat_jax.kernels.dispatch import Implementation
from coat_jax.kernels.gemm import Operand
from coat_jax.kernels.launch import Tile, divide
from coat_jax.kernels.routing import Groups
from coat_jax.kernels.sharding import launch_sharded


class Plan(NamedTuple):
    """How a product is divided into programs."""

    height: int  # rows of a program's block of the result
    width: int  # columns
    depth: int  # bytes of each row that one step of the loop reads
    together: int  # blocks of rows whose programs run side by side, on the same columns
    warps: int
    stages: int


PRODUCT = Plan(128, 256, 128, 8, 8, 3)
OUTER = Plan(128, 256, 128, 8, 8, 4)
LITTLE_MEMORY = Plan(128, 128, 128, 8, 8, 2)  # for GPUs with less than 100 KB of shared memory
GATHER = Tile(128, 64, 4)


class Spec(NamedTuple):
    """The constants of the kernels of products."""

    experts: int
    rows: int
    inputs: int  # columns that a product sums over
    outputs: int
    expert_stride: int  # of the weight
    output_stride: int
    input_stride: int
    height: int  # see `Plan`
    width: int
    depth: int  # numbers of each row that one step of the loop reads
    together: int
    gathered: bool
    pairs: int


class Sums(NamedTuple):
    """The constants of the kernel of `outer_product`."""

    inputs: int
    outputs: int
    input_stride: int
    input_row: int  # from one row to the next
    output_stride: int
    output_row: int
    height: int  # see `Plan`
    width: int
    depth: int  # rows that one step of the loop reads
    together: int


def product(
    x: Operand,
    w: Operand,
    groups: Groups,
    dtype: DTypeLike,
    implementation: Implementation,
    *,
    of_tokens: bool = False,
) -> Float[Array, "R N"]:
    """x w_e for weights [E, K, N], zero in empty rows.

    Args:
        x: rows [R, K], or tokens [T, K] with `of_tokens`.
        w: for the FP8 kernel transposed, [N, E, K].
        groups: of the rows.
        dtype: of the result.
        implementation: "xla" or "triton".
        of_tokens: whether x is in the order of tokens, not of rows.
    """
    if w.transposed is None:
        return _product([x], [w], "!e !k n", groups, dtype, implementation, of_tokens)
    w = w._replace(values=w.transposed)
    return _product([x], [w], "n !e !k", groups, dtype, implementation, of_tokens)


def product_transposed(
    dy: Sequence[Operand],
    w: Sequence[Operand],
    groups: Groups,
    dtype: DTypeLike,
    implementation: Implementation,
    *,
    of_tokens: bool = False,
) -> Float[Array, "R K"]:
    """The sum of dy_i w_i,e^T for weights [E, K, N], zero in empty rows.

    All dy_i must have one scale, and all w_i, too: the kernel scales the sum.
    """
    return _product(dy, w, "!e n !k", groups, dtype, implementation, of_tokens)


def outer_product(
    x: Operand, dy: Operand, groups: Groups, dtype: DTypeLike, implementation: Implementation
) -> Float[Array, "E K N"]:
    """x_e^T dy_e, summed over the rows of each expert. The FP8 kernel takes both transposed."""
    if implementation == "xla":
        return _ragged(_matrix(x.values), _matrix(dy.values), groups, (0, 0), _scale(x, dy), dtype)
    from coat_jax.kernels.triton.grouped import outer_product_tile

    (left, of_left), (right, of_right) = _columns(x, "m"), _columns(dy, "n")
    experts = groups.starts.shape[0] - 1

    def grid(left: Array, right: Array, *others: Array) -> dict[str, Any]:
        del others
        (m, of_m), (_, m_row) = (_stride(left.shape, of_left, axis) for axis in "mr")
        (n, of_n), (_, n_row) = (_stride(right.shape, of_right, axis) for axis in "nr")
        height, width, depth, together, warps, stages = _fitting(OUTER)
        strides = of_m, m_row, of_n, n_row
        spec = Sums(m, n, *strides, height, width, depth // left.dtype.itemsize, together)
        programs = experts * -(-m // height) * -(-n // width)
        return {"programs": programs, "warps": warps, "stages": stages, "SPEC": spec}

    inputs = [(left, of_left), (right, of_right), (groups.starts, "!s"), *_scales(x, dy)]
    (out,) = launch_sharded(outer_product_tile, inputs, [("!e m n", dtype)], grid, {"e": experts})
    return out


def gather_transposed(x: Float[Array, "T D"], groups: Groups) -> Float[Array, "D R"]:
    """FP8 codes of tokens in the order of rows, transposed; zero in empty rows."""
    from coat_jax.kernels.triton.grouped import gather_transposed_tile

    rows = groups.choices.shape[0]

    def grid(x: Array, *others: Array) -> dict[str, Any]:
        del others
        return divide(jax.ShapeDtypeStruct((rows, x.shape[1]), x.dtype), tile=GATHER)

    inputs = [(x, "!t d"), (groups.tokens, "!r")]
    (out,) = launch_sharded(gather_transposed_tile, inputs, [("d !r", x.dtype)], grid)
    return out


def _product(
    lefts: Sequence[Operand],
    rights: Sequence[Operand],
    axes: str,
    groups: Groups,
    dtype: DTypeLike,
    implementation: Implementation,
    of_tokens: bool,
) -> Float[Array, "R N"]:
    """The sum of the products of all pairs; `axes` are those of `values` on the right."""
    pairs = [(_matrix(x.values), w.values) for x, w in zip(lefts, rights, strict=True)]
    if implementation == "xla":
        summed, scale = axes.split().index("!k"), _scale(lefts[0], rights[0])
        shares = (
            _ragged(groups.of_tokens(x) if of_tokens else x, w, groups, (1, summed), scale, dtype)
            for x, w in pairs
        )
        return functools.reduce(operator.add, shares)
    from coat_jax.kernels.triton.grouped import product_tile

    rows, experts = groups.choices.shape[0], groups.starts.shape[0] - 1

    def grid(x: Array, w: Array, *others: Array) -> dict[str, Any]:
        del others
        (_, of_expert), (n, of_n), (k, of_k) = (_stride(w.shape, axes, axis) for axis in "enk")
        height, width, depth, together, warps, stages = _fitting(PRODUCT)
        blocks = (rows + experts * (height - 1)) // height
        together = max(1, min(together, blocks))
        strides, depth = (of_expert, of_n, of_k), depth // x.dtype.itemsize
        shape = experts, rows, k, n
        spec = Spec(*shape, *strides, height, width, depth, together, of_tokens, len(lefts))
        programs = -(-blocks // together) * together * -(-n // width)
        return {"programs": programs, "warps": warps, "stages": stages, "SPEC": spec}

    of_x = "!t !k" if of_tokens else "!r !k"
    arrays = [each for x, w in pairs for each in ((x, of_x), (w, axes))]
    arrays += [(None, "")] * (4 - len(arrays))
    tokens = groups.tokens if of_tokens else None
    inputs = [*arrays, (tokens, "!r"), (groups.starts, "!s"), *_scales(lefts[0], rights[0])]
    (out,) = launch_sharded(product_tile, inputs, [("!r n", dtype)], grid, {"r": rows})
    return out


def _fitting(plan: Plan) -> Plan:
    """The plan for this GPU: the given one on Hopper, B200 and B300."""
    return plan if dispatch.target_capability() // 10 in (9, 10) else LITTLE_MEMORY


def _stride(shape: Sequence[int], axes: str, axis: str) -> tuple[int, int]:
    """The size and the stride of one of the named axes."""
    at = axes.replace("!", "").split().index(axis)
    return shape[at], math.prod(shape[at + 1 :])


def _columns(x: Operand, axis: str) -> tuple[Array, str]:
    """An operand that is summed over its rows, and its axes."""
    if x.transposed is None:
        return _matrix(x.values), f"!r {axis}"
    return x.transposed.reshape(x.transposed.shape[0], -1), f"{axis} !r"


def _scales(*operands: Operand) -> list[tuple[Array, str]]:
    one = jnp.ones((), jnp.float32)
    return [(one if x.scale is None else x.scale, "") for x in operands]


def _scale(x: Operand, y: Operand) -> Float[Array, ""] | None:
    return None if x.scale is None or y.scale is None else x.scale * y.scale


def _matrix(x: Array | None) -> Float[Array, "R K"]:
    assert x is not None, "this product needs its operand straight"
    return x.reshape(-1, x.shape[-1])


def _ragged(
    x: Array,
    w: Array | None,
    groups: Groups,
    summed: tuple[int, int],
    scale: Float[Array, ""] | None,
    dtype: DTypeLike,
) -> Array:
    """A product by XLA, summed over these axes of x and w. Codes are multiplied in FP32."""
    assert w is not None
    over_rows = summed == (0, 0)
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((summed[0],), (summed[1],)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[] if over_rows else [0],
    )
    if scale is None:
        return lax.ragged_dot_general(x, w, groups.sizes, numbers, preferred_element_type=dtype)
    x, w = x.astype(jnp.float32), w.astype(jnp.float32)
    sums = lax.ragged_dot_general(x, w, groups.sizes, numbers, precision=lax.Precision.HIGHEST)
    return (sums * scale).astype(dtype)
