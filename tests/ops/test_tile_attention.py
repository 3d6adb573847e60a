"""Tile attention: its tiles and lists, its reference against a dense mask, and what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from ops_cases import assert_close, draw

from coat_jax import ops
from coat_jax.errors import UserError
from coat_jax.ops.tiles import Tiles, lists_of, visible_pairs

TILES = Tiles((4, 6, 4), (2, 3, 4))  # 4 tiles of 24 tokens, in 64 rows
B, N, H = 2, 3, 16
TOKENS = 96


def qkv(seed=0, batch=B):
    return draw(seed, *[(batch, TOKENS, N, H)] * 3)


def dense_mask(tiles, visible):
    """The pairs of tokens that attend, [.., S, S], from pairs of tiles."""
    tile_of = np.empty(tiles.count * tiles.tokens, int)
    tile_of[tiles.order()] = np.arange(tile_of.size) // tiles.tokens
    return np.asarray(visible)[..., tile_of, :][..., tile_of]


def masked(q, k, v, mask):
    scores = jnp.where(mask, jnp.einsum("bsnh,btnh->bnst", q, k) * q.shape[3] ** -0.5, -jnp.inf)
    return jnp.einsum("bnst,btnh->bsnh", jax.nn.softmax(scores), v)


@pytest.mark.parametrize(
    ("grid", "tile"),
    [
        ((21, 45, 80), (7, 9, 4)),  # the video of 720 x 1280
        ((21, 30, 52), (21, 3, 4)),  # 480 x 832
        ((8, 16, 16), (4, 8, 8)),
        ((64, 64), (16, 16)),
    ],
)
def test_the_best_tiles_leave_few_rows_empty_and_are_compact(grid, tile):
    best = Tiles.best(grid)
    assert best.tile == tile
    assert best.slots == 256
    assert best.empty < 0.02


def test_each_token_has_one_row_and_a_tile_is_a_box():
    rows = TILES.rows()
    assert rows.size == TILES.count * TILES.slots
    assert sorted(rows[rows >= 0]) == list(range(TOKENS))
    places = np.stack(np.unravel_index(TILES.order(), TILES.grid), -1)
    boxes = places.reshape(TILES.count, TILES.tokens, 3)
    assert np.all(np.ptp(boxes, axis=1) == np.array(TILES.tile) - 1)
    # In the order of tiles, rows follow each other.
    ordered = TILES.rows(ordered=True)
    np.testing.assert_array_equal(TILES.order()[ordered[ordered >= 0]], rows[rows >= 0])


def test_all_tiles_see_equally_many_in_a_window_and_themselves():
    tiles = Tiles((6, 10, 8), (1, 2, 2))
    lists = tiles.window((3, 3, 2), (20, 1, 1), None)
    assert np.all(lists.key_counts == np.array([18, 6, tiles.count])[:, None, None])
    pairs = visible_pairs(lists)
    assert np.all(np.diagonal(pairs, axis1=2, axis2=3))
    # Tiles of the first level are at most two apart along time, where the window is at an edge.
    places = np.stack(np.unravel_index(np.arange(tiles.count), tiles.shape), -1)
    apart = np.abs(places[:, None] - places[None])
    assert np.all(apart[np.asarray(pairs[0, 0])] <= (2, 2, 1))
    np.testing.assert_allclose(lists.density, [18 / tiles.count, 6 / tiles.count, 1], 1e-6)


def test_lists_are_the_pairs_that_they_were_made_of():
    visible = np.random.default_rng(0).random((2, 3, 5, 5)) < 0.4
    visible |= np.eye(5, dtype=bool)
    for lists in (lists_of(visible), jax.jit(lists_of)(jnp.asarray(visible))):
        np.testing.assert_array_equal(visible_pairs(lists), visible)
        turned = lists._replace(
            keys=lists.queries, key_counts=lists.query_counts, queries=lists.keys
        )
        np.testing.assert_array_equal(visible_pairs(turned), visible.swapaxes(2, 3))


def test_the_best_keys_are_those_of_the_largest_mean_scores():
    q, k, _ = qkv()
    lists = TILES.best_keys(q, k, 2)
    means = (x[:, TILES.order()].reshape(B, TILES.count, -1, N, H).mean(2) for x in (q, k))
    scores = np.einsum("bqnh,bknh->bnqk", *means)
    wanted = scores >= np.sort(scores)[..., -2:-1]
    np.testing.assert_array_equal(visible_pairs(lists), wanted)


@pytest.mark.parametrize("format", ["bf16", "fp8"])
def test_it_is_attention_with_a_mask_of_tiles(format):
    """FP8 rounds q, k, p and v; k's mean, twice as large as its rest, would cost far more."""
    q, k, v = qkv()
    k = k + 2 * draw(7, (1, 1, 1, H))
    lists, level = TILES.window((1, 1, 1), (2, 1, 1), None), jnp.array([1, 2])
    mask = dense_mask(TILES, visible_pairs(lists)[level])
    y, pull = jax.vjp(
        lambda *x: ops.tile_attention(*x, TILES, lists, level, format=format), q, k, v
    )
    wanted, wanted_pull = jax.vjp(lambda *x: masked(*x, mask), q, k, v)
    dy = draw(3, y.shape)
    bound = 1e-5 if format == "bf16" else 0.06
    for a, b in zip((y, *pull(dy)), (wanted, *wanted_pull(dy)), strict=True):
        assert np.linalg.norm(a - b) < bound * np.linalg.norm(b)


@pytest.mark.parametrize("which", range(3))
def test_an_infinity_is_not_hidden_by_rounding(which):
    arrays = [*qkv()]
    arrays[which] = arrays[which].at[0, 5, 1, 3].set(jnp.inf)
    assert not jnp.isfinite(ops.tile_attention(*arrays, TILES, format="fp8")).any()


def test_gradients_are_those_at_the_codes_with_rounding_as_the_identity():
    """Where q, k and v are codes already, only the probabilities and o are rounded."""
    q, k, v = (jnp.round(4 * x).clip(-8, 8) / 4 for x in qkv())
    k = jnp.concatenate([k[:, :48], -k[:, :48]], axis=1)  # its mean is zero
    mask = dense_mask(TILES, visible_pairs(TILES.dense()))
    attend = lambda *x: ops.tile_attention(*x, TILES, format="fp8")  # noqa: E731
    dy = draw(3, q.shape)
    wanted = jax.vjp(lambda *x: masked(*x, mask), q, k, v)[1](dy)
    for a, b in zip(jax.vjp(attend, q, k, v)[1](dy), wanted, strict=True):
        assert np.linalg.norm(a - b) < 0.01 * np.linalg.norm(b)


def test_levels_out_of_range_are_the_nearest_in_jit_where_they_cannot_be_refused():
    (q, k, v), lists = qkv(), TILES.window((1, 1, 1), None)
    attend = jax.jit(lambda level: ops.tile_attention(q, k, v, TILES, lists, level))
    np.testing.assert_array_equal(attend(jnp.array([-1, 2])), attend(jnp.array([0, 1])))


def test_only_without_rounding_it_has_second_derivatives():
    q, k, v = qkv()

    def length(q, attend):
        return jnp.sum(jax.grad(lambda q: jnp.sum(attend(q, k, v) ** 2))(q) ** 2)

    mask = dense_mask(TILES, visible_pairs(TILES.dense()))
    in_bf16 = functools.partial(ops.tile_attention, tiles=TILES, format="bf16")
    found = jax.grad(length)(q, in_bf16)
    wanted = jax.grad(length)(q, lambda *x: masked(*x, mask))
    assert np.linalg.norm(found - wanted) < 1e-4 * np.linalg.norm(wanted)
    with pytest.raises(TypeError, match=r'differentiated once only.*Use format="bf16"'):
        jax.grad(length)(q, functools.partial(ops.tile_attention, tiles=TILES))


def test_heads_of_other_lists_and_tokens_in_the_order_of_tiles():
    q, k, v = qkv()
    lists = TILES.best_keys(q, k, 3)
    level = jnp.arange(B)
    wanted = ops.tile_attention(q, k, v, TILES, lists, level)
    order = TILES.order()
    got = ops.tile_attention(
        q[:, order], k[:, order], v[:, order], TILES, lists, level, ordered=True
    )
    np.testing.assert_array_equal(got, wanted[:, order])


def test_it_composes_with_vmap_scan_and_checkpoints():
    arrays = qkv(batch=3)
    attend = lambda *x: ops.tile_attention(*x, TILES, TILES.window((1, 1, 1)), format="bf16")  # noqa: E731
    wanted = attend(*arrays)
    mapped = jax.vmap(lambda *x: attend(*(one[None] for one in x))[0])(*arrays)
    assert_close(mapped, wanted)
    step = jax.checkpoint(lambda c, x: (c + jnp.sum(attend(*(one[None] for one in x))), None))
    total = lambda *x: jax.lax.scan(step, 0.0, x)[0]  # noqa: E731
    gradients = jax.grad(total, argnums=(0, 1, 2))(*arrays)
    plain = jax.grad(lambda *x: jnp.sum(attend(*x)), argnums=(0, 1, 2))(*arrays)
    assert_close(gradients, plain)


def test_results_do_not_depend_on_the_mesh():
    arrays = draw(0, *[(4, TOKENS, 2, H)] * 3)
    lists, level = TILES.window((1, 1, 1), None), jnp.array([0, 1, 0, 1])
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharded = jax.device_put(arrays, NamedSharding(mesh, P("data", None, "tensor")))

    def f(*x):
        y, pull = jax.vjp(lambda *x: ops.tile_attention(*x, TILES, lists, level), *x)
        return y, *pull(y)

    assert_close(jax.jit(f)(*sharded), jax.jit(f)(*arrays))


Q = jnp.zeros((B, TOKENS, N, H))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.tile_attention(Q, Q, Q, Tiles((4, 6, 4), (3, 3, 4))), "do not divide a grid"),
        (lambda: Tiles((0, 4), (1, 1)), "positive number of tokens"),
        (lambda: ops.tile_attention(Q[:, 1:], Q, Q, TILES), r"takes q, k and v \[B, 96, N, H\]"),
        (lambda: ops.tile_attention(Q, Q, Q, TILES, causal=True), "is not causal"),
        (lambda: ops.tile_attention(Q, Q, Q, TILES, format="fp4"), "must be"),
        (
            lambda: ops.tile_attention(Q, Q, Q, TILES, level=jnp.array([0, 1])),
            "a level is 1: they are from 0 to 0",
        ),
        (lambda: ops.tile_attention(Q, Q, Q, TILES, level=jnp.array([0])), "one integer for each"),
        (
            lambda: ops.tile_attention(Q, Q, Q, TILES, level=jnp.array([0.7, 0.0])),
            "level float32",
        ),
        (
            lambda: ops.tile_attention(Q, Q, Q, TILES, Tiles.best((8, 8)).dense()),
            "lists are for 1 tiles",
        ),
        (lambda: TILES.window((1, 1)), "not one of a grid"),
        (lambda: TILES.window(1, 1, 1), "a size for each level"),
        (lambda: lists_of(np.eye(4, dtype=bool)), r"takes booleans \[levels, heads"),
        (
            lambda: ops.tile_attention(Q, Q, Q, TILES, TILES.window((1, 1, 1), None)),
            "lists have 2 levels: say the level of each sample",
        ),
        (lambda: TILES.best_keys(Q, Q, 5), "count=5 must be from 1 to"),
        (lambda: TILES.best_keys(Q, Q[:, 1:], 2), "best_keys got 95 tokens for a grid of"),
        (lambda: lists_of(np.zeros((1, 1, 2, 2), bool)), "tile of queries 0 sees no tile of keys"),
        (lambda: lists_of(jnp.zeros((1, 1, 2, 2), bool)), "tile of queries 0 sees no tile of keys"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(call, message):
    with pytest.raises((UserError, ValueError), match=message) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_a_list_with_tiles_outside_the_grid_is_refused():
    lists = TILES.dense()
    wrong = lists._replace(keys=lists.keys + 1)
    with pytest.raises(UserError, match="a tile in a list is 4: they are from 0 to 3"):
        ops.tile_attention(Q, Q, Q, TILES, wrong)
