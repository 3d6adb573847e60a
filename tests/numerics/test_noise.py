"""Laws of the hash that feeds stochastic rounding.

All keys are fixed, so nothing here is flaky: a bound of SIGMAS standard deviations only
says how surprising a good hash would have to be to fail.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from coat_jax.numerics import noise

SIGMAS = 6  # one in 5e8
SHAPE = (512, 2048)
COUNT = 512 * 2048
RUN = 128
uniform = jax.jit(noise.uniform, static_argnames=("shape", "run"))
mix = jax.jit(noise.mix)
leaf_key = jax.jit(noise.leaf_key, static_argnames=("seed", "leaf"))
round_to_bfloat16 = jax.jit(noise.round_to_bfloat16, static_argnames="run")


def sample(seed=0, step=3, leaf=1, shape=SHAPE, run=RUN):
    return np.asarray(uniform(leaf_key(seed, step, leaf), shape, run=run), np.float64)


def correlation(a, b):
    return np.corrcoef(a.ravel(), b.ravel())[0, 1]


def test_mix_can_be_undone():
    """Inverts the hash step by step, with whole numbers of any size."""

    def unmix(y):
        y ^= y >> 16
        y = y * pow(0x846CA68B, -1, 2**32) % 2**32
        y ^= (y >> 15) ^ (y >> 30)
        y = y * pow(0x7FEB352D, -1, 2**32) % 2**32
        return y ^ (y >> 16)

    x = np.random.default_rng(0).integers(0, 2**32, 1000, dtype=np.uint32)
    x[:2] = 0, 2**32 - 1
    assert [unmix(int(y)) for y in mix(x)] == x.tolist()


def test_flipping_any_bit_flips_each_bit_half_of_the_time():
    n = 2**15
    x = jnp.asarray(np.random.default_rng(0).integers(0, 2**32, n, dtype=np.uint32))
    inputs = (np.uint32(1) << np.arange(32, dtype=np.uint32))[:, None]
    change = np.asarray(mix(x)) ^ np.asarray(mix(np.asarray(x) ^ inputs))
    bits = np.arange(32, dtype=np.uint32)
    share = np.stack([np.mean(change >> bit & 1, axis=-1) for bit in bits])
    # lowbias32's own imperfection is under 1 %, to which sampling adds 1 / (2 sqrt(n)).
    assert np.abs(share - 0.5).max() < 0.01 + SIGMAS * 0.5 / np.sqrt(n)


def test_keys_of_all_steps_seeds_and_leaves_differ_and_are_those_of_all_leaves():
    """Exactly: both are bijections of 32 bits."""
    steps = jax.vmap(lambda step: leaf_key(7, step, 5))(jnp.arange(2**16))
    assert len(np.unique(steps)) == 2**16
    every_leaf = [*range(512), 2**32 - 1]
    for step in (11, 2**31 - 1):
        keys = noise.leaf_key(7, step, every_leaf).tolist()
        assert len(set(keys)) == len(every_leaf)
        for leaf in (0, 1, 5, 2**32 - 1):
            assert keys[every_leaf.index(leaf)] == int(noise.leaf_key(7, step, leaf))
    assert int(leaf_key(0, 11, 5)) != int(leaf_key(1, 11, 5))


def test_noise_is_uniform():
    for run in (16, 128):
        u = sample(run=run)
        assert u.min() >= 0
        assert u.max() < 1
        # The variances of u, u^2 and of a bin's count are 1/12, 4/45 and n p (1 - p).
        assert abs(u.mean() - 1 / 2) < SIGMAS * np.sqrt(1 / 12 / COUNT)
        assert abs((u**2).mean() - 1 / 3) < SIGMAS * np.sqrt(4 / 45 / COUNT)
        counts = np.histogram(u, bins=256, range=(0, 1))[0]
        chi_square = np.sum((counts - COUNT / 256) ** 2) / (COUNT / 256)
        assert abs(chi_square - 255) < SIGMAS * np.sqrt(2 * 255)
        by_lane = u.reshape(-1, run)
        bound = SIGMAS * np.sqrt(1 / 12 / len(by_lane))
        assert np.abs(by_lane.mean(axis=0) - 0.5).max() < bound


def test_every_odd_multiple_of_two_to_the_minus_17_can_occur_and_nothing_else():
    scaled = (sample() * 2**17 - 1) / 2
    np.testing.assert_array_equal(scaled, np.round(scaled))
    for bit in range(16):
        share = np.mean(scaled.astype(np.int64) >> bit & 1)
        assert abs(share - 0.5) < SIGMAS * 0.5 / np.sqrt(COUNT), f"bit {bit}"


def test_lanes_are_independent_at_any_probability():
    """Both of two lanes are under p as often as independent numbers are: p^2 of the time."""
    many = np.asarray(uniform(leaf_key(0, 3, 1), (4096, 4096), run=RUN)).ravel()
    for p in (2.0**-2, 2.0**-6, 2.0**-9, 2.0**-12):
        u = many < p
        for lag in (1, 2, 3):
            pairs = u.size - lag
            joint = np.count_nonzero(u[:-lag] & u[lag:])
            bound = SIGMAS * np.sqrt(pairs * p * p) + 3
            assert abs(joint - pairs * p * p) < bound, (p, lag)


def test_leaves_are_known_by_their_path_whatever_stands_beside_them():
    whole = {"a": jnp.ones(2), "b": [jnp.ones(3), jnp.ones(4)], "c": jnp.ones(5)}
    part = {"a": optax.MaskedNode(), "b": [optax.MaskedNode(), jnp.ones(4)], "c": jnp.ones(5)}
    ids = noise.leaf_ids(whole)
    assert len(set(ids)) == 4
    assert noise.leaf_ids(part) == ids[2:]


@pytest.mark.parametrize("check_vma", [True, False])
def test_shards_have_keys_of_their_own_and_replicas_the_same(check_vma):
    mesh = Mesh(np.array(jax.devices("cpu")[:8]).reshape(2, 4), ("x", "y"))

    def keys(x):
        key = leaf_key(0, 3, 1, x)
        return jnp.broadcast_to(key, x.shape) + (x * 0).astype(jnp.uint32)

    mapped = jax.shard_map(keys, mesh=mesh, in_specs=P("y"), out_specs=P("y"), check_vma=check_vma)
    got = np.asarray(jax.jit(mapped)(jnp.arange(4.0)))
    # Without the check, shard_map does not say what is the same.
    assert len(set(got.tolist())) == (4 if check_vma else 1)


def test_members_of_a_vmap_have_keys_of_their_own():
    def key(x, shared):
        return leaf_key(0, 3, 1, x, shared)

    x, shared = jnp.zeros((3, 4, 5)), jnp.ones(5)
    nested = jax.jit(jax.vmap(jax.vmap(key, (0, None)), (0, None)))(x, shared)
    assert nested.shape == (3, 4)
    assert len(np.unique(nested)) == 12
    assert len(np.unique(jax.vmap(key, (None, None), axis_size=3)(x[0, 0], shared))) == 1
    assert int(key(x[0, 0], shared)) == int(leaf_key(0, 3, 1))


def test_neighbours_rows_and_pairs_steps_leaves_and_seeds_are_not_correlated():
    """The second number of a lane's pair is the first of its neighbour.

    Nor are the numbers for rounding parameters correlated with those for moments.
    """
    u = sample()
    for lag in (1, 2, 3, 8, 64, RUN, RUN + 1, SHAPE[1]):
        own, other = u.ravel()[:-lag], u.ravel()[lag:]
        assert abs(correlation(own, other)) < SIGMAS / np.sqrt(COUNT), lag
    own, other = (np.asarray(u) for u in noise.uniform_pair(leaf_key(0, 3, 1), SHAPE, run=RUN))
    np.testing.assert_array_equal(own, u)
    np.testing.assert_array_equal(other, own.reshape(512, -1, 2)[..., ::-1].reshape(SHAPE))
    shape = (64, 2048)
    names = itertools.product((0, 1, 2**31), (3, 4, 2**31 - 1), (1, 2, 300))
    a, *others = (sample(*name, shape=shape) for name in names)
    others.append(np.asarray(uniform(noise.param_key(leaf_key(0, 3, 1)), shape, run=RUN)))
    for b in others:
        assert abs(correlation(a, b)) < SIGMAS / np.sqrt(a.size)
        assert abs(correlation(a.ravel()[1:], b.ravel()[:-1])) < SIGMAS / np.sqrt(a.size)


def test_noise_depends_neither_on_the_leading_shape_nor_on_the_mesh():
    flat = sample(shape=(16, 1024))
    np.testing.assert_array_equal(sample(shape=(2, 2, 4, 1024)), flat.reshape(2, 2, 4, 1024))
    np.testing.assert_array_equal(sample(shape=(1024,)), flat[0])
    for shape in ((), (3, 0), (17,), (2, 3, 33)):
        for run in (1, 128):
            u = sample(shape=shape, run=run)
            assert u.shape == shape
            assert len(np.unique(u)) == u.size
    mesh = Mesh(np.array(jax.devices("cpu")[:8]).reshape(2, 4), ("x", "y"))
    for spec in (P("x"), P("x", "y"), P(("x", "y")), P(None, ("x", "y"))):
        sharding = NamedSharding(mesh, spec)
        program = jax.jit(
            lambda key: noise.uniform(key, (16, 1024), run=RUN), out_shardings=sharding
        )
        sharded = program(leaf_key(0, 3, 1))
        assert sharded.sharding.is_equivalent_to(sharding, 2)
        np.testing.assert_array_equal(sharded, flat)


def test_a_bfloat16_infinity_and_nan_stay():
    """All 65536 numbers but for denormals, which XLA flushes."""
    x = jnp.arange(2**16, dtype=jnp.uint16).view(jnp.bfloat16)
    x = np.array(jnp.where(jnp.abs(x) < 2.0**-126, 0, x).astype(jnp.float32).reshape(256, 256))
    # Adding noise to the bits of the second and the fourth would carry into the sign.
    nans = np.array([0x7FC00000, 0x7FFFFFFF, 0x7FC00001, 0xFFFFFFFF], np.uint32)
    x[0, :4] = nans.view(np.float32)
    for step in range(8):
        rounded = round_to_bfloat16(x, leaf_key(0, step, 0), run=RUN)
        assert rounded.dtype == jnp.bfloat16
        np.testing.assert_array_equal(rounded.astype(jnp.float32), x)


def test_rounding_to_bfloat16_is_unbiased_between_neighbours():
    rng = np.random.default_rng(0)
    exponent, mantissa = rng.integers(-125, 127, 16), rng.integers(0, 2**23, 16)
    mantissa[:3], exponent[:2] = (0, 2**23 - 1, 2**15), (-125, 126)
    sign = rng.choice([-1, 1], 16)
    x = np.float32(sign * 2.0**exponent * (1 + mantissa / 2**23))
    many = jnp.broadcast_to(x[:, None], (16, 2**17))
    many = np.float64(round_to_bfloat16(many, leaf_key(0, 1, 0), run=RUN).astype(jnp.float32))
    # In units of BF16's last place above the lower neighbour: 0 or 1, on average the fraction.
    unit, fraction = 2.0 ** (exponent - 7), (mantissa % 2**16) / 2**16
    lower = sign * 2.0**exponent * (1 + mantissa // 2**16 / 2**7)
    up = (many - lower[:, None]) / (sign * unit)[:, None]
    assert set(np.unique(up)) <= {0.0, 1.0}
    bound = SIGMAS * np.sqrt(np.maximum(fraction * (1 - fraction), 2**-16) / 2**17)
    assert np.all(np.abs(up.mean(axis=1) - fraction) < bound)
