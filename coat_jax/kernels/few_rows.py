"""What a decode step in INT4 computes between its products, one launch each.

    normalize     x -> norm(x), rounded
    store_heads   products -> queries, rotated; keys, rotated, and values, as the cache has them
    combine       parts of attention -> o, rounded
    activate      products -> act(gate) up, rounded

XLA has three launches where a row is rounded: its largest magnitude, the codes, their sums. With
one token of each text a launch takes longer than what it computes. A program holds a whole row.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax.kernels.activation import HAVE_KERNELS, Limited
from coat_jax.kernels.activation import Constants as Activating
from coat_jax.kernels.attention_to_past import Past
from coat_jax.kernels.int4 import COUNTS, FEW_ROWS, SCHEDULE, Product, Rows
from coat_jax.kernels.norm import Norm, constants_of, padded_width, warps_of
from coat_jax.kernels.sharding import launch_sharded, on_one_device
from coat_jax.numerics.cache_formats import CacheFormat, StoredHeads
from coat_jax.numerics.eight_bits import DTYPES
from coat_jax.numerics.formats import E4M3, format_of
from coat_jax.numerics.four_bits import GROUP

WIDEST = COUNTS * SCHEDULE.rows  # columns of a row

ROUNDED = [("!m !k", E4M3), ("!m", jnp.float32), (f"!k/{GROUP} !m", jnp.float32)]


class Row(NamedTuple):
    """The constants of a row."""

    rows: int
    columns: int
    width: int  # a power of two
    parts: int = 1  # of products
    counts: int = COUNTS


class Heads(NamedTuple):
    """The constants of the heads of queries, keys and values, or of the parts of attention."""

    rows: int
    heads: int  # of queries
    kv_heads: int
    width: int  # of a head
    parts: int
    format: str  # of the cache


def fits(rows: int, *columns: int) -> bool:
    """Whether the kernels take so many rows of so many columns, on the devices that are set."""
    whole = all(n % GROUP == 0 and n <= WIDEST for n in columns)
    # Columns may be sharded on a mesh, and a program would not have the whole row.
    return whole and 0 < rows <= FEW_ROWS and on_one_device()


def normalize(x: Float[Array, "M K"], norm: Norm | None) -> Rows:
    """norm(x), or x, rounded."""
    from coat_jax.kernels.triton.few_rows import normalize_and_round_row

    row = _row(*x.shape)
    scale, shift = (None, None) if norm is None else (norm.scale, norm.shift)
    constants = None if norm is None else constants_of(norm, row.columns, 1)
    inputs = [(x, "!m !k"), (scale, "!k"), (shift, "!k")]
    return _rounded(normalize_and_round_row, inputs, row, NORM=constants)


def activate(gate: Product, up: Product, act: Limited) -> Rows:
    """act(gate) up, rounded."""
    from coat_jax.kernels.triton.few_rows import activate_and_round_row

    parts, rows, columns = gate.parts.shape
    inputs = [(gate.parts, "!p !m !k"), (up.parts, "!p !m !k"), (gate.scale, "!m")]
    constants = Activating(*act, gated=True)
    return _rounded(activate_and_round_row, inputs, _row(rows, columns, parts), ACT=constants)


def has_activation(name: str) -> bool:
    """Whether `activate` computes this one."""
    return name in HAVE_KERNELS


def store_heads(
    products: Sequence[Product],
    cos: Float[Array, "M H/2"],
    sin: Float[Array, "M H/2"],
    format: CacheFormat | None,
    dtype: DTypeLike,
) -> tuple[Float[Array, "M 1 N H"], Past]:
    """Queries and keys, rotated; keys and values as a cache has them, codes [M, K, 1, H].

    Args:
        products: q, k and v.
        cos: of the angles of each row's pairs.
        sin: likewise.
        format: of the cache.
        dtype: of the queries, and of a cache without a format.
    """
    from coat_jax.kernels.triton.few_rows import store_head

    width = 2 * cos.shape[1]
    parts, rows, _ = products[0].parts.shape
    heads, kv_heads, _ = (product.parts.shape[2] // width for product in products)
    in_int4, has_scale = format == "int4", format is not None
    of_codes: dict[Any, Any] = {None: dtype, "int4": jnp.uint8, **DTYPES}
    of_head = f"!m !k !h/{2 if in_int4 else 1}", of_codes[format]
    number = ("!m !k" if has_scale else "", jnp.bfloat16)
    zero = ("!m !k" if in_int4 else "", jnp.bfloat16)
    q, *stored = launch_sharded(
        store_head,
        [
            *((products[i].parts, f"!p !m !c{i}") for i in range(3)),
            *((products[0].scale, "!m"), (cos, "!m !h/2"), (sin, "!m !h/2")),
        ],
        [("!m !n !h", dtype), *[of_head, number, zero] * 2],
        lambda *_: {"programs": rows * (heads + 2 * kv_heads), "warps": 1},
        {"n": heads, "k": kv_heads, "h": width},
        HEADS=Heads(rows, heads, kv_heads, width, parts, format or "none"),
        F8=format_of(E4M3),
    )

    def heads_of(codes: Array, scale: Array, zero: Array) -> StoredHeads:
        given = scale if has_scale else None, zero if in_int4 else None
        return StoredHeads(codes[:, :, None], *(None if x is None else x[..., None] for x in given))

    return q[:, None], Past(heads_of(*stored[:3]), heads_of(*stored[3:]))


def combine(o: Float[Array, "M K P G H"], log_sums: Float[Array, "M K P G"]) -> Rows:
    """Attention from its parts (`attention_to_past.attend_in_parts`), rounded."""
    from coat_jax.kernels.triton.few_rows import combine_and_round_row

    rows, kv_heads, parts, group, width = o.shape
    heads = Heads(rows, kv_heads * group, kv_heads, width, parts, "none")
    row = _row(rows, heads.heads * width)._replace(width=padded_width(heads.heads) * width)
    inputs = [(o, "!m !c !p !g !h"), (log_sums, "!m !c !p !g")]
    return _rounded(combine_and_round_row, inputs, row, HEADS=heads)


def _rounded(
    kernel: Any, inputs: Sequence[tuple[Array | None, str]], row: Row, **constants: Any
) -> Rows:
    return Rows(
        *launch_sharded(
            kernel,
            inputs,
            [*ROUNDED, ("!counts", jnp.int32)],
            lambda *_: {"programs": row.rows, "warps": warps_of(row.columns)},
            {"k": row.columns, "counts": row.counts},
            ROW=row,
            F8=format_of(E4M3),
            **constants,
        )
    )


def _row(rows: int, columns: int, parts: int = 1) -> Row:
    return Row(rows, columns, padded_width(columns), parts)
