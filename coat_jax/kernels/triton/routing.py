"""Sums over each token's choices: see `kernels.routing`."""

import triton
import triton.language as tl

from coat_jax.kernels.triton.grouped import store_rounded
from coat_jax.kernels.triton.tiles import tile_indices


@triton.jit
def combine_tile(
    rows, places, weights, out, CHOICES: tl.constexpr, WEIGHTED: tl.constexpr, TILES: tl.constexpr
):
    """The sums of a tile [tokens, columns], weighted if WEIGHTED."""
    token, column = tile_indices(TILES)
    there = token < TILES.rows
    mask = there[:, None] & (column < TILES.columns)[None, :]
    HEIGHT: tl.constexpr = TILES.height
    WIDTH: tl.constexpr = TILES.width
    total = tl.zeros([HEIGHT, WIDTH], tl.float32)
    for j in tl.static_range(CHOICES):
        choice = token * CHOICES + j
        place = tl.load(places + choice, mask=there, other=0).to(tl.int64)
        where = rows + place[:, None] * TILES.columns + column[None, :]
        share = tl.load(where, mask=mask, other=0.0).to(tl.float32)
        if WEIGHTED:
            share *= tl.load(weights + choice, mask=there, other=0.0)[:, None]
        total += share
    store_rounded(total, out + token.to(tl.int64)[:, None] * TILES.columns + column[None, :], mask)
