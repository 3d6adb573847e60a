"""Attention between tiles of tokens: what `ops.tile_attention` computes with.

    gather       [B, S, N, H] -> [B, N, rows, H], tile after tile, as they are or as FP8 codes
    forward      -> o and the base-2 logarithm of each row's sum of exponentials
    backward     -> the gradients of q, k and v, recomputed from these

Each has a reference in jnp, whose mask has a number for each pair of rows. The kernels read lists
of tiles instead. A product x of codes of queries and keys is a score in base 2 after multiplication
with `factor`, so p = 2^(x factor - log_sums).

In FP8 p is rounded, too: as 2^(x factor - m + 8), where m is the largest score so far. The backward
pass is in BF16. The codes are exact in it, so it recomputes the scores of the forward pass.
"""

import math
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int32

from coat_jax.kernels.launch import Schedule
from coat_jax.kernels.sharding import launch_sharded
from coat_jax.numerics.formats import E4M3, format_of, saturating_cast

Qkv = tuple[Array, Array, Array]  # in rows of tiles, [B, N, R, H]

LIFT = 8.0  # log2 of the largest p in FP8
TOKENS, ROWS, TRANSPOSED, SUMS = "b !s n !h", "b n !r !h", "b n !h !r", "b n !r"
# The fastest of those tried on an H200.
GATHER = Schedule(64, 64, 4, 1)
FORWARD, FORWARD_IN_BF16 = Schedule(64, 128, 4, 3), Schedule(128, 64, 4, 3)
QUERIES = Schedule(128, 128, 8, 2)
KEYS = Schedule(64, 64, 4, 2)  # rows of queries, columns of keys


class Geometry(NamedTuple):
    """How rows lie in tiles."""

    tiles: int
    tokens: int  # of a tile
    slots: int  # rows of a tile: a multiple of 64


class Spec(NamedTuple):
    """The constants of the kernels."""

    tiles: int
    tokens: int
    slots: int
    heads: int
    width: int  # of a head
    list_heads: int
    most: int  # tiles of a list
    queries: int  # rows of a block
    keys: int


class Lists(NamedTuple):
    """The tiles that each tile sees, or is seen by, and which of the levels each sample has."""

    tiles: Int32[Array, "levels heads A most"]
    counts: Int32[Array, "levels heads A"]
    level: Int32[Array, " B"]


class Scores(NamedTuple):
    """What turns products of codes into results.

    Attributes:
        factor: of q k, so that 2^(q k factor - log_sums) are probabilities.
        query: of the gradient of q; that of k has `key`.
        key: see `query`.
        value: of v.
    """

    factor: Float[Array, ""]
    query: Float[Array, ""]
    key: Float[Array, ""]
    value: Float[Array, ""]


def gather(
    x: Float[Array, "B S N H"],
    rows: Int32[np.ndarray, " R"],
    geometry: Geometry,
    scale: Float[Array, ""] | None = None,
    mean: Float[Array, "B N H"] | None = None,
    *,
    transposed: bool = False,
) -> tuple[Array, Array | None]:
    """The rows of tiles, zero where empty, and their transpose [B, N, H, R] if it is wanted.

    With a scale they are (x - mean) / scale in E4M3.
    """
    from coat_jax.kernels.triton.tile_attention import gather_tile

    batch, _, heads, width = x.shape
    if mean is None:
        mean = jnp.zeros((batch, heads, width), jnp.float32)
    dtype = x.dtype if scale is None else E4M3
    out, columns = _launch(
        gather_tile,
        GATHER,
        geometry,
        [
            (x, TOKENS),
            (jnp.asarray(rows), "!r"),
            (mean, "b n !h"),
            (jnp.float32(1) if scale is None else scale, ""),
        ],
        [(ROWS, dtype), (TRANSPOSED if transposed else "", dtype)],
        ROUND=scale is not None,
        TRANSPOSE=transposed,
        F8=format_of(E4M3),
    )
    return out, columns if transposed else None


def gather_reference(
    x: Float[Array, "B S N H"],
    rows: Int32[np.ndarray, " R"],
    scale: Float[Array, ""] | None = None,
    mean: Float[Array, "B N H"] | None = None,
) -> Float[Array, "B N R H"]:
    """The rows of `gather`."""
    there = (rows >= 0)[:, None]
    found = jnp.where(there, x[:, rows].swapaxes(1, 2), 0)
    if scale is None:
        return found
    wide = found.astype(jnp.float32)
    if mean is not None:
        wide = jnp.where(there, wide - mean[:, :, None], 0)
    return saturating_cast(wide / scale, E4M3)


def forward(
    qkv: Qkv,
    scores: Scores,
    rows: Int32[np.ndarray, " R"],
    geometry: Geometry,
    keys: Lists,
    dtype: DTypeLike,
) -> tuple[Float[Array, "B S N H"], Float[Array, "B N R"]]:
    """o, and the base-2 logarithms of sums, which are infinite in empty rows.

    v is [B, N, H, R] in FP8.
    """
    from coat_jax.kernels.triton.tile_attention import forward_tile

    q, k, v = qkv
    in_fp8 = q.dtype == E4M3
    o, log_sums = _launch(
        forward_tile,
        FORWARD if in_fp8 else FORWARD_IN_BF16,
        geometry,
        [
            (q, ROWS),
            (k, ROWS),
            (v, TRANSPOSED if in_fp8 else ROWS),
            (scores.factor, ""),
            (scores.value, ""),
            (jnp.asarray(rows), "!r"),
            *_named(keys),
        ],
        [(TOKENS, dtype), (SUMS, jnp.float32)],
        keys,
        FP8=in_fp8,
        F8=format_of(E4M3),
    )
    return o, log_sums


def backward(
    qkv: Qkv,
    o: Float[Array, "B S N H"],
    do: Float[Array, "B S N H"],
    log_sums: Float[Array, "B N R"],
    scores: Scores,
    rows: Int32[np.ndarray, " R"],
    geometry: Geometry,
    keys: Lists,
    queries: Lists,
) -> tuple[Float[Array, "B S N H"], ...]:
    """The gradients of q, k and v; these are not in FP8, but may be numbers that FP8 has."""
    from coat_jax.kernels.triton.tile_attention import (
        gather_gradient_tile,
        key_gradient_tile,
        query_gradient_tile,
    )

    q, k, v = qkv
    tokens: tuple[Array, str] = (jnp.asarray(rows), "!r")
    d, delta = _launch(
        gather_gradient_tile,
        GATHER,
        geometry,
        [(do, TOKENS), (o, TOKENS), tokens],
        [(ROWS, do.dtype), (SUMS, jnp.float32)],
    )
    shared = [(q, ROWS), (k, ROWS), (v, ROWS), (d, ROWS), (delta, SUMS), (log_sums, SUMS)]
    shared += [(scores.factor, ""), (scores.value, "")]
    (dq,) = _launch(
        query_gradient_tile,
        QUERIES,
        geometry,
        [*shared, (scores.query, ""), tokens, *_named(keys)],
        [(TOKENS, do.dtype)],
        keys,
    )
    # The tiles that most queries see come first, so that no program is late.
    order = jnp.argsort(-queries.counts, axis=-1).astype(jnp.int32)
    lists = _named(queries)
    dk, dv = _launch(
        key_gradient_tile,
        KEYS,
        geometry,
        [*shared, (scores.key, ""), tokens, (order, lists[1][1]), *lists],
        [(TOKENS, do.dtype), (TOKENS, do.dtype)],
        queries,
        "keys",
    )
    return dq, dk, dv


def forward_reference(
    qkv: Qkv,
    scores: Scores,
    visible: Bool[Array, "B N R R"],
) -> tuple[Float[Array, "B N R H"], Float[Array, "B N R"]]:
    """o in rows of tiles, in FP32, and the base-2 logarithms of sums."""
    in_fp8 = qkv[0].dtype == E4M3
    q, k, v = (x.astype(jnp.float32) for x in qkv)
    x = jnp.where(visible, jnp.einsum("bnrh,bnth->bnrt", q, k) * scores.factor, -jnp.inf)
    largest = jnp.max(x, axis=-1, keepdims=True)
    p = jnp.exp2(jnp.where(visible, x - largest, -jnp.inf))
    total = jnp.sum(p, axis=-1)
    if in_fp8:
        p = saturating_cast(p * 2**LIFT, E4M3).astype(jnp.float32) * 2**-LIFT
    o = jnp.einsum("bnrt,bnth->bnrh", p, v) * (scores.value / total[..., None])
    return o, largest[..., 0] + jnp.log2(total)


def backward_reference(
    qkv: Qkv,
    o: Float[Array, "B N R H"],
    do: Float[Array, "B N R H"],
    log_sums: Float[Array, "B N R"],
    scores: Scores,
    visible: Bool[Array, "B N R R"],
) -> tuple[Float[Array, "B N R H"], ...]:
    """The gradients of q, k and v in rows of tiles, in FP32."""
    q, k, v, o, do = (x.astype(jnp.float32) for x in (*qkv, o, do))
    x = jnp.einsum("bnrh,bnth->bnrt", q, k) * scores.factor - log_sums[..., None]
    p = jnp.exp2(jnp.where(visible, x, -jnp.inf))
    dp = jnp.einsum("bnrh,bnth->bnrt", do, v) * scores.value
    ds = p * (dp - jnp.sum(do * o, axis=-1, keepdims=True))
    dq = jnp.einsum("bnrt,bnth->bnrh", ds, k) * scores.query
    dk = jnp.einsum("bnrt,bnrh->bnth", ds, q) * scores.key
    return dq, dk, jnp.einsum("bnrt,bnrh->bnth", p, do)


def _named(lists: Lists) -> list[tuple[Array, str]]:
    heads = "!one" if lists.tiles.shape[1] == 1 else "n"
    named = zip(lists, (f"!l {heads} !t !m", f"!l {heads} !t", "b"), strict=True)
    return list(named)


def _launch(
    kernel: Any,
    schedule: Schedule,
    geometry: Geometry,
    inputs: list[tuple[Array, str]],
    outputs: list[tuple[str, DTypeLike]],
    lists: Lists | None = None,
    over: Literal["queries", "keys"] = "queries",
    **constants: Any,
) -> tuple[Array, ...]:
    """Runs a kernel, a program for each block of queries or keys.

    The first of `inputs` has axes [B, S, N, H] or [B, N, R, H].
    """
    # A block lies in one tile.
    queries, keys = (math.gcd(n, geometry.slots) for n in (schedule.rows, schedule.columns))
    in_order = inputs[0][1] == ROWS

    def grid(first: Array, *others: Array) -> dict[str, Any]:
        del others
        batch, heads = first.shape[0], first.shape[1 if in_order else 2]
        shared = lists is None or lists.tiles.shape[1] == 1
        most = 0 if lists is None else lists.tiles.shape[-1]
        size = queries if over == "queries" else keys
        return {
            "programs": batch * heads * geometry.tiles * geometry.slots // size,
            "warps": schedule.warps,
            "stages": schedule.stages,
            "SPEC": Spec(
                *geometry, heads, first.shape[3], 1 if shared else heads, most, queries, keys
            ),
        }

    sizes = {"s": geometry.tiles * geometry.tokens, "r": geometry.tiles * geometry.slots}
    return launch_sharded(kernel, inputs, outputs, grid, sizes, **constants)
