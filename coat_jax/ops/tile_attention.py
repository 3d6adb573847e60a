"""Attention between tiles of tokens, in FP8 or BF16.

    o = softmax(q k^T / sqrt(H)) v        over the tiles of keys that each tile of queries sees

In FP8, q, k, v and the probabilities are in E4M3. q and k have one scale each, after the mean of k
over the tokens is subtracted: the softmax does not see it, but it may be many times as large as the
rest. v has one scale, too. All are powers of two, so the backward pass, in BF16, has the same
numbers; it takes rounding for the identity. What is saved is a byte for each number of q, k and v,
and o.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from coat_jax.errors import UserError
from coat_jax.kernels import tile_attention as kernels
from coat_jax.kernels.dispatch import Implementation, choose
from coat_jax.numerics.explicit_axes import explicit_spec, shard_inside
from coat_jax.numerics.formats import E4M3
from coat_jax.ops.checks import require_indices, require_number, require_real
from coat_jax.ops.definition import differentiable_once
from coat_jax.ops.tiles import TileLists, Tiles, visible_pairs

WIDTHS = (64, 128)  # of heads, in the kernels
LOG2_E = 1.4426950408889634
Format = Literal["fp8", "bf16"]


class _Settings(NamedTuple):
    tiles: Tiles
    ordered: bool
    in_fp8: bool
    scale: float
    implementation: Implementation

    @property
    def rows(self) -> np.ndarray:
        return self.tiles.rows(self.ordered)

    @property
    def geometry(self) -> kernels.Geometry:
        return kernels.Geometry(self.tiles.count, self.tiles.tokens, self.tiles.slots)


def tile_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S N H"],
    v: Float[Array, "B S N H"],
    tiles: Tiles,
    lists: TileLists | None = None,
    level: Int[Array, " B"] | None = None,
    *,
    format: Format = "fp8",
    scale: float | None = None,
    ordered: bool = False,
    causal: bool = False,
    implementation: Implementation | None = None,
) -> Float[Array, "B S N H"]:
    """Attention in which each tile of queries sees the tiles of keys in its list.

    Args:
        q: queries of the tokens of a grid, flattened: the last axis of the grid is the fastest.
        k: keys.
        v: values.
        tiles: how the grid is divided.
        lists: what sees what; all sees all without it. See `Tiles.window` and `Tiles.best_keys`.
        level: of each sample; needed if the lists have several levels.
        format: "fp8", or "bf16", which rounds nothing.
        scale: of the scores, 1 / sqrt(H) by default.
        ordered: whether tokens are in the order of `tiles.order()`, tile after tile. A model that
            orders its tokens once, with their positions, saves memory traffic.
        causal: is refused: all keys of a tile have one scale, so it would see the future.
        implementation: "xla", with a mask over all pairs of tokens, "triton", or None to choose by
            the device.
    """
    if causal:
        raise UserError(
            "tile_attention is not causal: a scale covers all tokens, so each one would see a "
            "little of those after it. Use coat.ops.attention."
        )
    _require_arrays(q, k, v, tiles)
    if format not in ("fp8", "bf16"):
        raise ValueError(f'format={format!r} must be "fp8" or "bf16".')
    lists = tiles.dense() if lists is None else lists
    lists, level = _require_lists(lists, level, tiles, q)
    if scale is None:
        scale = q.shape[3] ** -0.5
    else:
        require_number("scale", scale)
    implementation = choose(implementation, products=format == "fp8")
    if implementation == "triton" and q.shape[3] not in WIDTHS:
        raise UserError(
            f"the kernels of tile_attention take heads of 64 or 128 numbers, not {q.shape[3]}. Use "
            'such heads, or implementation="xla", which computes a mask over all pairs of tokens.'
        )
    settings = _Settings(tiles, ordered, format == "fp8", float(scale), implementation)
    arrays = q, k, v, lists, level
    result: Array = shard_inside(
        partial(_attend, settings), lambda: PartitionSpec(*explicit_spec(q)), *arrays
    )
    return result


def _require_arrays(q: Array, k: Array, v: Array, tiles: Tiles) -> None:
    for array in (q, k, v):
        require_real("tile_attention", array)
    tokens = tiles.count * tiles.tokens
    alike = q.shape == k.shape == v.shape and q.dtype == k.dtype == v.dtype
    if not alike or q.ndim != 4 or q.shape[1] != tokens:
        shapes = ", ".join(f"{x.dtype.name}{list(x.shape)}" for x in (q, k, v))
        raise ValueError(
            f"tile_attention takes q, k and v [B, {tokens}, N, H] of one dtype for a grid of "
            f"{tiles.grid}, not {shapes}."
        )


def _require_lists(
    lists: TileLists, level: Any, tiles: Tiles, q: Array
) -> tuple[TileLists, Int[Array, " B"]]:
    """Returns the lists, and the level of each sample."""
    levels, heads, count, _ = lists.keys.shape
    if count != tiles.count or heads not in (1, q.shape[2]):
        raise ValueError(
            f"lists are for {count} tiles and {heads} heads, and there are {tiles.count} tiles and "
            f"{q.shape[2]} heads; lists of one head serve all."
        )
    if level is None:
        if levels > 1:
            raise ValueError(f"lists have {levels} levels: say the level of each sample.")
        level = np.zeros(len(q), np.int32)
    level = level if isinstance(level, jax.Array) else np.asarray(level)
    if level.shape != (len(q),) or not jnp.issubdtype(level.dtype, jnp.integer):
        given = f"{level.dtype.name}{list(level.shape)}"
        raise ValueError(f"level {given} must have one integer for each of {len(q)} samples.")
    keys = require_indices("a tile in a list", lists.keys, count)
    queries = require_indices("a tile in a list", lists.queries, count)
    return lists._replace(keys=keys, queries=queries), require_indices("a level", level, levels)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    settings: _Settings, q: Array, k: Array, v: Array, lists: TileLists, level: Array
) -> Array:
    return _forward(settings, q, k, v, lists, level)[0]


def _forward(
    settings: _Settings, q: Array, k: Array, v: Array, lists: TileLists, level: Array
) -> tuple[Array, Any]:
    rows, mean = settings.rows, None
    of_q = of_k = of_v = jnp.float32(1)
    if settings.in_fp8:
        wide = k.astype(jnp.float32)
        mean = jnp.mean(wide, axis=1)
        largest, smallest = jnp.max(wide, axis=1), jnp.min(wide, axis=1)
        of_k = _power_of_two(jnp.maximum(largest - mean, mean - smallest))
        of_q, of_v = (_power_of_two(jnp.abs(x).astype(jnp.float32)) for x in (q, v))
    scores = kernels.Scores(
        of_q * of_k * (settings.scale * LOG2_E), of_k * settings.scale, of_q * settings.scale, of_v
    )
    of_inputs = (of_q, of_k, of_v) if settings.in_fp8 else (None, None, None)
    if settings.implementation == "xla":
        codes = (
            kernels.gather_reference(q, rows, of_inputs[0]),
            kernels.gather_reference(k, rows, of_inputs[1], mean),
            kernels.gather_reference(v, rows, of_inputs[2]),
        )
        visible = _visible(settings, lists, level)
        o, log_sums = kernels.forward_reference(codes, scores, visible)
        o = _scatter(settings, o).astype(q.dtype)
    else:
        gather = partial(kernels.gather, rows=rows, geometry=settings.geometry)
        q_rows, _ = gather(q, scale=of_inputs[0])
        k_rows, _ = gather(k, scale=of_inputs[1], mean=mean)
        straight, transposed = gather(v, scale=of_inputs[2], transposed=settings.in_fp8)
        codes = q_rows, k_rows, straight
        used = q_rows, k_rows, straight if transposed is None else transposed
        keys = kernels.Lists(lists.keys, lists.key_counts, level)
        o, log_sums = kernels.forward(used, scores, rows, settings.geometry, keys, q.dtype)
    return o, (codes, o, log_sums, scores, lists, level)


def _backward(settings: _Settings, saved: Any, do: Array) -> tuple[Any, ...]:
    saved, _ = jax.lax.optimization_barrier((saved, do))
    codes, o, log_sums, scores, lists, level = saved
    qkv = jax.tree.map(lambda x: x.astype(do.dtype), codes)
    if settings.implementation == "xla":
        of_o, d = (kernels.gather_reference(x, settings.rows) for x in (o, do))
        visible = _visible(settings, lists, level)
        found = kernels.backward_reference(qkv, of_o, d, log_sums, scores, visible)
        gradients = tuple(_scatter(settings, d).astype(do.dtype) for d in found)
    else:
        keys = kernels.Lists(lists.keys, lists.key_counts, level)
        queries = kernels.Lists(lists.queries, lists.query_counts, level)
        how = settings.rows, settings.geometry, keys, queries
        gradients = kernels.backward(qkv, o, do, log_sums, scores, *how)
    none = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), (lists, level))
    return *gradients, *none


def _differentiate(settings: _Settings, saved: Any, do: Array) -> tuple[Any, ...]:
    backward: Callable[..., tuple[Any, ...]] = partial(_backward, settings)
    if settings.in_fp8:
        backward = differentiable_once("tile_attention", backward, 'format="bf16"')
    return backward(saved, do)


_attend.defvjp(_forward, _differentiate)


def _power_of_two(magnitudes: Array) -> Float[Array, ""]:
    """The smallest power of two with which E4M3 has all these numbers; NaN if one is not finite."""
    largest = jnp.max(magnitudes) / float(jnp.finfo(E4M3).max)
    _, exponent = jnp.frexp(jnp.maximum(largest, 2.0**-120))
    # frexp's mantissa is below 1: only a power of two itself needs one less.
    exact = largest == jnp.exp2(exponent - 1.0)
    power = jnp.exp2(exponent - exact.astype(jnp.float32))
    return jnp.where(jnp.isfinite(largest), power, jnp.nan)


def _visible(settings: _Settings, lists: TileLists, level: Array) -> Array:
    """The pairs of rows [B, N or 1, R, R] that attend, for the reference."""
    slots = settings.tiles.slots
    pairs = visible_pairs(lists)[level]
    pairs = jnp.repeat(jnp.repeat(pairs, slots, axis=2), slots, axis=3)
    return pairs & (settings.rows >= 0)


def _scatter(settings: _Settings, x: Float[Array, "B N R H"]) -> Float[Array, "B S N H"]:
    """Rows of tiles as tokens."""
    rows = settings.rows
    places = np.argsort(np.where(rows < 0, rows.size, rows), kind="stable")
    return x[:, :, places[: settings.tiles.count * settings.tiles.tokens]].swapaxes(1, 2)
