"""Laws of the rule for which moments are stored in FP8, and of storing them."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax.numerics import expansion, noise
from coat_jax.numerics.expansion import Expanded
from coat_jax.numerics.formats import E4M3, E5M2
from coat_jax.storage import MIN_COLUMNS, PAPER, Storage, stochastic_below

write = jax.jit(Storage.write, static_argnums=(0, 2))
read = jax.jit(Storage.read, static_argnums=0)
encode = jax.jit(expansion.encode, static_argnames=("dtype", "group_size"))
encode_dithered = jax.jit(expansion.encode_dithered, static_argnums=1)
decode = jax.jit(expansion.decode, static_argnames="group_size")

SHAPES = [(), (0,), (3, 0), (1,), (17,), (64, 15), (64, 16), (3, 5, 129)]


def values_of(shape):
    return np.float32(np.random.default_rng(0).normal(size=shape))


def test_8_bits_need_the_size_and_the_columns():
    in_8_bits = [(16384,), (1024, 16), (4, 64, 64)]
    in_fp32 = [(), (0,), (1000, 0), (16383,), (2048, 15), (16384, 1), (16, 1024, 1)]
    assert all(map(Storage().quantizes, in_8_bits))
    assert not any(map(Storage().quantizes, in_fp32))
    for shape in SHAPES:
        assert Storage(min_size=0).quantizes(shape)
        for least in (1, 2, 17, 960, 10**9):
            enough = math.prod(shape) >= least and (shape or (0,))[-1] >= MIN_COLUMNS
            assert Storage(min_size=least).quantizes(shape) == enough


def test_leaves_in_fp32_are_exact():
    """NaN and infinity too: FP32 leaves are kept as they are. Half precision becomes FP32."""
    storage = Storage(min_size=10**9)
    for shape in SHAPES:
        values = values_of(shape)
        values = np.where(values > 1, np.float32(np.inf), np.where(values < -1, np.nan, values))
        stored = storage.write(jnp.asarray(values), storage.first)
        assert stored.codes.dtype == jnp.float32
        np.testing.assert_array_equal(storage.read(stored), values)
    stored = storage.write(jnp.full((2, 3), 0.1, jnp.bfloat16), storage.first)
    assert stored.codes.dtype == storage.read(stored).dtype == jnp.float32


@pytest.mark.parametrize("shape", [(), (3, 5, 129)], ids=str)
@pytest.mark.parametrize("stochastic", [False, True])
def test_leaves_in_fp8_are_expanded(shape, stochastic):
    storage, values = Storage(min_size=0, group_size=32), values_of(shape)
    key = noise.leaf_key(3, 1, 4) if stochastic else None
    stored = write(storage, values, E5M2, key)
    dither = noise.uniform(key, shape, run=32) if stochastic else None
    want = encode(values, E5M2, group_size=32, noise=dither)
    assert stored.codes.dtype == E5M2
    jax.tree.map(np.testing.assert_array_equal, stored, want)
    np.testing.assert_array_equal(read(storage, stored), decode(want, group_size=32))


def test_the_tree_is_the_same_whatever_the_rule_says():
    def layout(shape, min_size):
        storage = Storage(min_size=min_size, group_size=32)
        values = jax.ShapeDtypeStruct(shape, jnp.float32)
        return jax.eval_shape(lambda x: storage.write(x, E4M3), values)

    for shape in SHAPES:
        in_8_bits, in_fp32 = layout(shape, 0), layout(shape, 10**9)
        assert isinstance(in_8_bits, Expanded)
        assert jax.tree.structure(in_8_bits) == jax.tree.structure(in_fp32)
        assert in_8_bits.codes.shape == in_fp32.codes.shape
        assert (in_8_bits.codes.dtype, in_fp32.codes.dtype) == (E4M3, jnp.float32)
        for one, other in zip(in_8_bits[1:], in_fp32[1:], strict=True):
            assert (one.ndim, one.dtype) == (other.ndim, other.dtype)


def test_scales_that_an_fp32_leaf_does_not_use_are_few_and_can_be_sharded_as_it_is():
    """Trainers copy a parameter's PartitionSpec onto arrays of the same rank.

    They take at most five bytes for four, where all axes but the last can be sharded.
    """
    sizes = (0, 1, 3, 7, 8, 12, 1024)
    shapes = [shape for rank in range(4) for shape in itertools.product(sizes, repeat=rank)]
    ratios = {}
    for shape in shapes:
        scales = Storage(min_size=10**10).scales_shape(shape)
        if math.prod(shape):
            ratios[shape] = 5 * math.prod(scales) / (4 * math.prod(shape))
        for parts in (2, 4, 8):
            pairs = zip(shape[:-1], scales[:-1], strict=True)
            assert all(scale % parts == 0 for size, scale in pairs if size % parts == 0)
            if shape and shape[-1] % (parts * 128) == 0:
                assert scales[-1] % parts == 0
    assert max(ratios.values()) == ratios[8, 8, 1] == 1.25


def test_a_slow_first_moment_is_rounded_stochastically_and_a_fast_one_dithered():
    for first, fast, slow in ((E4M3, 0.9, 0.95), (E5M2, 0.8, 0.9)):
        storage = Storage(min_size=0, first=first)
        assert storage.rounding_of_first(0.0) == storage.rounding_of_first(fast) == "dithered"
        assert storage.rounding_of_first(slow) == storage.rounding_of_first(0.99) == "stochastic"
    assert Storage(stochastic=False).rounding_of_first(0.9) == "nearest"
    storage = Storage(min_size=0, first=E4M3)
    m, key = values_of((4, 256)), noise.leaf_key(0, 1, 2)
    computed = jax.jit(storage.write_moments)
    for b1 in (0.9, 0.95):
        known = jax.jit(lambda m, key, b1=b1: storage.write_moments(m, m**2, key, b1, 0.95))(m, key)
        jax.tree.map(np.testing.assert_array_equal, known, computed(m, m**2, key, b1, 0.95))


# E5M2 stands still from 0.9 on.
@pytest.mark.parametrize(("first", "decays"), [(E4M3, (0.5, 0.8, 0.9, 0.91)), (E5M2, (0.5, 0.85))])
def test_every_code_of_a_dithered_first_moment_decays_without_a_gradient(first, decays):
    """However its noise falls, a normal code sinks; so nothing is held up above the smallest."""
    codes = np.arange(1, 127, dtype=np.uint8).view(first).astype(np.float32)
    codes = codes[np.isfinite(codes) & (codes >= 2.0 ** (-5 if first == E4M3 else -13))]
    groups = np.zeros((1, 128), np.float32)
    groups[0, : len(codes)] = codes
    groups[0, -2:] = codes.max(), codes.min() * 2.0**-20  # so that k = 1
    for b1, u in itertools.product(decays, (0.0, 0.5, 1 - 2.0**-17)):
        assert Storage(min_size=0, first=first).rounding_of_first(b1) == "dithered"
        dither = np.full(groups.shape, u, np.float32)
        decayed = np.where(np.arange(128) == 126, groups, np.float32(b1) * groups)
        after = decode(encode_dithered(decayed, first, dither))
        assert np.all(np.asarray(after)[0, : len(codes)] < codes)


def test_a_storage_is_compared_by_value_and_has_one_spelling():
    storage = Storage(group_size=np.int64(64), min_size=np.int32(0), stochastic=np.bool_(True))
    assert type(storage.group_size) is int
    assert storage == dataclasses.replace(Storage(), group_size=64, min_size=0)
    assert hash(storage) == hash(Storage(group_size=64, min_size=0))
    assert Storage() != Storage(stochastic=False)
    assert Storage(first="int8", second=np.dtype("uint8"), seed=2**32 - 1) == Storage(
        seed=2**32 - 1
    )
    assert Storage(first="float8_e4m3fn").first == Storage(first="e4m3").first == E4M3
    with pytest.raises(dataclasses.FrozenInstanceError):
        Storage().seed = 1


FORMATS = [jnp.float32, jnp.bfloat16, jnp.float8_e4m3b11fnuz, "int16", None, "fp8", 8]
REFUSED = {
    "must be a whole number among 16, 32, .*1024": {
        "group_size": [0, -128, 100, 8, 2048, "128", 128.5, True, None]
    },
    "must be a whole number (of at least|from) 0": {
        "min_size": [-1, 1.5, True, "0", None],
        "seed": [-1, 2**32, 1.5, True, "0", None],  # the noise is hashed from 32 bits
    },
    "must be True or False": {"stochastic": [1, "no", None]},
    r"is not a format .*coat\.formats\.E4M3": {
        "first": [*FORMATS, jnp.uint8],
        "second": [*FORMATS, jnp.int8],
        "other": [*FORMATS, jnp.int8],
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_wrong_settings_are_refused(message):
    for field, values in REFUSED[message].items():
        for value in values:
            with pytest.raises(ValueError, match=f"{field}=.* {message}"):
                Storage(**{field: value})


def adam_moments(seed=0):
    """Moments of groups whose second moments span 15 binades or so."""
    rng = np.random.default_rng(seed)
    root = np.exp(rng.normal(size=(256, 128)))
    return np.float32(0.2 * rng.normal(size=root.shape) * root), np.float32(root**2)


def stored(storage, m, v, b1):
    """The moments as they are read, from one program."""

    @jax.jit
    def program(m, v):
        return storage.read_moments(*storage.write_moments(m, v, noise.leaf_key(0, 1, 2), b1, 0.95))

    return program(m, v)


def test_both_moments_are_right_on_average():
    m, v = (np.broadcast_to(x[:1], (4096, 128)) for x in adam_moments())
    both = stored(Storage(min_size=0), m, v, b1=1.0)
    for read, exact in zip(both, (m, v), strict=True):
        got = np.asarray(read, np.float64)
        error = 6 * got.std(0) / np.sqrt(len(got)) + 2e-3 * np.abs(exact[0])
        assert np.all(np.abs(got.mean(0) - exact[0]) <= error)


def test_a_first_moment_whose_second_is_too_small_to_be_stored_is_right_on_average():
    """It is divided by the root of the smallest second moment, with which it will be read."""
    m, v = adam_moments()
    storage = Storage(min_size=0)
    _, nu = storage.write_moments(m, v, noise.leaf_key(0, 1, 2), 1.0, 0.95)
    smallest = float(np.asarray(storage.smallest_second(nu))[0, 0])
    m, v = (np.array(np.broadcast_to(x[:1], (4096, 128))) for x in (m, v))
    place = (slice(None), slice(0, 8))
    m[:, 1:], v[place] = 0.0, 0.01 * smallest
    m[:, :8] = 0.05 * np.sqrt(smallest)
    read, _ = stored(storage, m, v, b1=1.0)
    got = np.asarray(read, np.float64)[place]
    assert np.all(np.abs(got.mean(0) - m[place][0]) <= 6 * got.std(0) / 64 + 2e-3 * m[0, 0])


@pytest.mark.parametrize("b", [0.96, 0.99])
def test_a_slow_moment_comes_to_where_equal_gradients_keep_it(b):
    """Rounded to nearest it would stay 1 / (2 (1 - b)) codes away: a tenth of its size and more."""
    storage = Storage(min_size=0)
    target = np.full((64, 128), 0.8, np.float32)
    target[:, 0] = 1.0  # the largest of each group

    def step(mu, number):
        m = b * storage.read(mu) + (1 - b) * target
        mu = storage.write_momentum(m, noise.leaf_key(0, number, 0), b)
        return mu, storage.read(mu).mean()

    below = np.where(target == 1.0, target, 0.5 * target)
    start = storage.write_momentum(below, noise.leaf_key(0, 0, 1), b)
    _, means = jax.lax.scan(step, start, jnp.arange(800))
    np.testing.assert_allclose(np.mean(means[-200:]), target.mean(), rtol=0.01)


def test_every_code_of_a_direction_that_is_rounded_to_nearest_decays():
    codes = np.arange(1, 128)
    for b1, b2 in ((0.9, 0.95), (0.9, 0.999), (0.95, 0.95), (0.5, 0.9)):
        below = float(stochastic_below(b1, b2))
        stays = np.round(codes * b1 / np.sqrt(b2)) == codes
        assert not np.any(stays[codes >= below])
        assert np.any(stays) == (below > 1)
    for b1, b2 in ((0.99, 0.95), (0.9, 0.0), (1.0, 0.999), (0.98, 0.99)):  # do not decay, or slowly
        assert np.isinf(jax.jit(stochastic_below)(b1, b2))


def test_the_papers_formats_have_a_name():
    assert Storage(first=E4M3, second=E4M3, stochastic=False) == PAPER
    m, v = adam_moments()
    mu, nu = PAPER.write_moments(m, v, noise.leaf_key(0, 1, 2), 0.9, 0.95)
    jax.tree.map(np.testing.assert_array_equal, mu, encode(m, E4M3, group_size=128))
    jax.tree.map(np.testing.assert_array_equal, nu, encode(v, E4M3, group_size=128))


@pytest.mark.parametrize(("b", "apart"), [(0.95, 1), (0.99, 2)])
def test_large_codes_of_a_momentum_that_decays_fast_are_rounded_to_nearest(b, apart):
    """MIN_DECAY / (1 - b) = 15: codes from there on lose enough by themselves."""
    storage = Storage(min_size=0)
    m = np.full((512, 128), 100.3 / 127, np.float32)
    m[:, 0], m[:, 1] = 1.0, 10.3 / 127
    codes = np.asarray(storage.write_momentum(jnp.asarray(m), noise.leaf_key(0, 1, 0), b).codes)
    assert set(np.unique(codes[:, 1])) == {10, 11}
    assert len(np.unique(codes[:, 2:])) == apart
