"""Tiles of a grid of tokens, and which of them attend to which.

The tokens of a video, [frames, height, width], or of a picture are divided into tiles of the same
shape. `tile_attention` computes the scores of whole tiles: each tile of queries has a list of the
tiles of keys that it sees. Nothing else makes attention sparse, and dense attention is the list of
all tiles.

    tiles = Tiles.best((21, 45, 80))          # tiles of 7 x 9 x 4 tokens
    lists = tiles.window((3, 3, 7))           # 63 of the 300 tiles: the nearest ones
    lists = tiles.window((1, 3, 3), (3, 3, 7), None)    # three levels; the last one is dense

A *level* is one set of lists. Each sample of a batch names its level by a number, an array, so one
program serves all denoising steps.
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from coat_jax.errors import UserError

SLOTS = 64  # a tile takes a multiple of so many rows in the kernels
BEST = 256  # slots of a tile that keep the tensor cores busy
Shape = tuple[int, ...]


class TileLists(NamedTuple):
    """Which tiles of keys each tile of queries sees, and the transpose for the backward pass.

    A list is as long as the longest one needs; the tiles that follow its count are not seen. Heads
    are all of them, or 1 if they share their lists.
    """

    keys: Int32[Array, "levels heads Q K_most"]
    key_counts: Int32[Array, "levels heads Q"]
    queries: Int32[Array, "levels heads K Q_most"]
    query_counts: Int32[Array, "levels heads K"]

    @property
    def density(self) -> Float[Array, " levels"]:
        """The share of all pairs of tiles that is computed, for each level."""
        return jnp.mean(jnp.asarray(self.key_counts), axis=(1, 2)) / self.queries.shape[2]


@dataclasses.dataclass(frozen=True)
class Tiles:
    """A grid of tokens in tiles.

    Attributes:
        grid: tokens along each axis, such as (frames, height, width).
        tile: tokens of a tile along each axis; divides the grid.
    """

    grid: Shape
    tile: Shape

    def __post_init__(self) -> None:
        grid, tile = _shape("grid", self.grid), _shape("tile", self.tile)
        object.__setattr__(self, "grid", grid)
        object.__setattr__(self, "tile", tile)
        if len(grid) != len(tile) or any(n % t for n, t in zip(grid, tile, strict=False)):
            padded = tuple(-(-n // t) * t for n, t in zip(grid, tile, strict=False))
            raise UserError(
                f"tiles of {_by(tile)} do not divide a grid of {_by(grid)}. Pad it to "
                f"{_by(padded)}, or take the best that do, Tiles.best({grid}): "
                f"{_by(Tiles.best(grid).tile)}."
            )

    @classmethod
    def best(cls, grid: Sequence[int], slots: int = BEST) -> "Tiles":
        """Tiles that fill up to `slots` rows of the kernels, with the fewest rows left empty.

        Of tiles that leave equally few, the most compact: its tokens are closest to each other. An
        axis whose length is a prime has no tile but 1 and all of it: pad it.
        """
        grid = _shape("grid", grid)
        tiles = [
            cls(grid, tile)
            for tile in itertools.product(*map(_divisors, grid))
            if math.prod(tile) <= slots
        ]
        return min(tiles, key=lambda t: (round(t.empty, 2), -t.slots, sum(1 / n for n in t.tile)))

    @property
    def shape(self) -> Shape:
        """How many tiles lie along each axis."""
        return tuple(n // of_tile for n, of_tile in zip(self.grid, self.tile, strict=True))

    @property
    def count(self) -> int:
        """How many tiles there are."""
        return math.prod(self.shape)

    @property
    def tokens(self) -> int:
        """Tokens of a tile."""
        return math.prod(self.tile)

    @property
    def slots(self) -> int:
        """Rows that a tile takes in the kernels: its tokens, and empty ones."""
        return -(-self.tokens // SLOTS) * SLOTS

    @property
    def empty(self) -> float:
        """The share of rows that are empty."""
        return 1 - self.tokens / self.slots

    def order(self) -> Int32[np.ndarray, " count*tokens"]:
        """The tokens of the grid, tile after tile: `x[:, tiles.order()]` puts an array in order."""
        numbers = np.arange(math.prod(self.grid), dtype=np.int32)
        split = itertools.chain(*zip(self.shape, self.tile, strict=True))
        axes = range(2 * len(self.grid))
        return numbers.reshape(*split).transpose(*axes[::2], *axes[1::2]).reshape(-1)

    def rows(self, ordered: bool = False) -> Int32[np.ndarray, " count*slots"]:
        """The token in each row of the kernels, -1 in empty ones.

        Args:
            ordered: whether arrays are in the order of `order`, not in that of the grid.
        """
        tokens = self.order().reshape(self.count, self.tokens)
        if ordered:
            tokens = np.arange(tokens.size, dtype=np.int32).reshape(tokens.shape)
        empty = ((0, 0), (0, self.slots - self.tokens))
        return np.pad(tokens, empty, constant_values=-1).reshape(-1)

    def window(self, *sizes: Sequence[int] | None) -> TileLists:
        """Each tile sees the tiles around it, for each of these sizes, which are the levels.

        The window is moved inwards at the edges of the grid, so all tiles see equally many.

        Args:
            sizes: tiles along each axis; None for all of them. A window that is larger than the
                grid is all of it.
        """
        if not sizes or any(isinstance(size, int) for size in sizes):
            raise UserError(
                f"window{sizes} must have a size for each level, such as window((3, 3, 7)), or "
                "None for all tiles."
            )
        levels = []
        for size in sizes:
            sides = self.shape if size is None else _shape("window", size)
            if len(sides) != len(self.grid):
                raise UserError(f"a window of {_by(sides)} is not one of a grid of {self.grid}.")
            visible = np.ones((1, 1), bool)
            for count, side in zip(self.shape, sides, strict=True):
                first = np.clip(np.arange(count) - side // 2, 0, max(count - side, 0))
                offset = np.arange(count)[None, :] - first[:, None]
                visible = np.kron(visible, (offset >= 0) & (offset < side))
            levels.append(visible[None])
        return lists_of(np.stack(levels))

    def dense(self) -> TileLists:
        """Each tile sees all."""
        return self.window(None)

    def best_keys(
        self,
        q: Float[Array, "B S N H"],
        k: Float[Array, "B S N H"],
        count: int,
        *,
        ordered: bool = False,
    ) -> TileLists:
        """Each tile sees the tiles whose mean key has the largest scores with its mean query.

        There is a level for each sample, so `level` is `jnp.arange(B)`. The choice has no gradient.

        Args:
            q: queries.
            k: keys.
            count: tiles that each one sees.
            ordered: whether both are in the order of `order`.
        """
        if not 1 <= (count := operator.index(count)) <= self.count:
            raise UserError(f"count={count} must be from 1 to the number of tiles, {self.count}.")

        def pooled(x: Array) -> Float[Array, "B T N H"]:
            if x.shape[1] != self.count * self.tokens:
                raise ValueError(f"best_keys got {x.shape[1]} tokens for a grid of {self.grid}.")
            x = x if ordered else x[:, self.order()]
            tiles = x.reshape(len(x), self.count, self.tokens, *x.shape[2:])
            return jnp.mean(tiles, axis=2, dtype=jnp.float32)

        means = map(pooled, jax.lax.stop_gradient((q, k)))
        scores = jnp.einsum("bqnh,bknh->bnqk", *means)
        _, chosen = jax.lax.top_k(scores, count)
        return lists_of(jnp.sum(jax.nn.one_hot(chosen, self.count, dtype=jnp.int8), axis=-2) > 0)


def lists_of(visible: Bool[Array, "levels heads Q K"] | Bool[np.ndarray, "..."]) -> TileLists:
    """The lists of the pairs of tiles that are visible."""
    if visible.ndim != 4 or visible.dtype != bool:
        raise ValueError(
            "lists_of takes booleans [levels, heads, tiles, tiles], not "
            f"{visible.dtype.name}{list(visible.shape)}."
        )
    numpy = not isinstance(visible, jax.core.Tracer)
    visible = np.asarray(visible) if numpy else visible
    xp = np if numpy else jnp
    if numpy and not visible.any(axis=-1).all():
        level, head, tile = np.argwhere(~visible.any(axis=-1))[0]
        raise UserError(
            f"the tile of queries {tile} sees no tile of keys (level {level}, head {head}): its "
            "softmax would have no terms."
        )

    def listed(pairs: Any) -> tuple[Any, Any]:
        counts = xp.sum(pairs, axis=-1, dtype=xp.int32)
        most = int(counts.max()) if numpy else pairs.shape[-1]
        # A stable sort puts the visible tiles first, in their order.
        first = xp.argsort(~pairs, axis=-1, stable=True)[..., :most]
        return first.astype(xp.int32), counts

    return TileLists(*listed(visible), *listed(xp.swapaxes(visible, -1, -2)))


def visible_pairs(lists: TileLists) -> Bool[Array, "levels heads Q K"]:
    """The pairs of tiles that are in the lists."""
    tiles, most = lists.queries.shape[2], lists.keys.shape[-1]
    there = jnp.arange(most) < lists.key_counts[..., None]
    chosen = jnp.where(there, lists.keys, tiles)[..., None] == jnp.arange(tiles)
    return jnp.any(chosen, axis=-2)


def _shape(name: str, sizes: Sequence[int]) -> Shape:
    shape = tuple(operator.index(n) for n in sizes)
    if not shape or min(shape) < 1:
        raise UserError(f"{name} {shape} must have a positive number of tokens along each axis.")
    return shape


@functools.cache
def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _by(shape: Shape) -> str:
    return " x ".join(map(str, shape))
