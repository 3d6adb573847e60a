"""Laws of dynamic range expansion.

The oracle is the exact image F (|x| / amax)^k, computed in FP64 with the k that was stored,
and the table of the format's values. JAX computes the image through two FP32 logarithms of
at most 128 in magnitude, so of 2^-17 in the last place: together, four last places, their
difference is good to LOG2_ERROR = 2^-15, which k multiplies in the image.

Rounding changes the image by a factor 1 + e, and so x by (1 + e)^(1/k):

    normal codes     |e| <= 2^-4 (E4M3) or 2^-3 (E5M2), twice that if stochastic
    subnormal codes  |e| <= half the smallest code over the image, or a whole one

Group sizes and shapes come from a fixed menu, because each compiles anew; the values are drawn.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from coat_jax import expansion, noise
from coat_jax.expansion import Expanded
from coat_jax.formats import E4M3, E5M2, format_of

SMALLEST = 2.0**-125
FLOAT32_MAX = float(np.finfo(np.float32).max)
LAST_NOISE = 1 - 2.0**-23  # the largest number that `noise.uniform` gives
LOG2_ERROR = 2.0**-15
MAX_LOG2_X = float(np.log2(FLOAT32_MAX))

encode = jax.jit(expansion.encode, static_argnames=("dtype", "group_size"))
decode = jax.jit(expansion.decode, static_argnames="group_size")
formats = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["E4M3", "E5M2"])
roundings = pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])


class Case(NamedTuple):
    shape: tuple[int, ...]
    group_size: int
    dtype: Any
    stochastic: bool

    def __str__(self):
        rounding = "stochastic" if self.stochastic else "nearest"
        return f"{self.shape}/{self.group_size}-{format_of(self.dtype).name}-{rounding}"


# Nothing, a tail of one, rank 3, whole groups; rank 0, most of a group.
MENU = [
    ((0,), 16),
    ((3, 0), 32),
    ((0, 40), 32),
    ((17,), 16),
    ((2, 3, 65), 32),
    ((3, 513), 256),
    ((2, 1024), 512),
    ((), 128),
    ((5, 127), 128),
    ((4, 256), 64),
]
PLAIN = MENU[-1]  # for laws that do not care, to spare a compilation
# A shape and a format have nothing to do with each other: the last three do for E5M2.
CASES = [
    Case(shape, group_size, dtype, stochastic)
    for dtype, menu in ((E4M3, MENU), (E5M2, MENU[-3:]))
    for shape, group_size in menu
    for stochastic in (False, True)
]
everywhere = pytest.mark.parametrize("case", CASES, ids=str)

# What a group looks like: log2 of its largest, binades down to its smallest (the special
# ones are around what fits k = 255/16 and k = 1), share of zeros, share of negatives.
regimes = st.lists(
    st.tuples(
        st.one_of(st.floats(-125, 128), st.sampled_from([-125.0, -107.5, 0.0, 128.0])),
        st.one_of(st.floats(0, 40), st.sampled_from([0.0, 1.11, 17.77, 31.8, 253.0])),
        st.sampled_from([0.0, 0.0, 0.1, 0.9]),
        st.sampled_from([0.0, 0.5, 1.0]),
    ),
    min_size=1,
    max_size=4,
)
seeds = st.integers(0, 2**32 - 1)


def hostile(regimes, seed, shape, group_size):
    """Values in 0, 2^-125 .. 3.4e38 and their negatives; the groups take turns at the regimes."""
    rng = np.random.default_rng(seed)
    columns = shape[-1] if shape else 1
    groups = -(-columns // group_size)
    rows = int(np.prod(shape[:-1], dtype=int))
    which = np.arange(rows * groups).reshape(rows, groups, 1) % len(regimes)
    top, spread, zeros, negative = np.moveaxis(np.array(regimes)[which], -1, 0)
    place = rng.choice([0.0, 1.0, np.nan], size=(rows, groups, group_size), p=[0.1, 0.1, 0.8])
    place = np.where(np.isnan(place), rng.random(place.shape), place)
    x = np.exp2(np.clip(top - spread * place, -125, MAX_LOG2_X))
    x = np.clip(x, SMALLEST, FLOAT32_MAX)
    x = np.where(rng.random(x.shape) < zeros, 0, x)
    x = np.where(rng.random(x.shape) < negative, -x, x)
    return x.reshape(rows, groups * group_size)[:, :columns].reshape(shape).astype(np.float32)


def hostile_noise(seed, shape):
    """Uniform noise, and often its smallest and its largest value."""
    rng = np.random.default_rng(seed)
    u = rng.integers(0, 2**23, shape) / 2**23
    extreme = rng.random(shape)
    return np.float32(np.where(extreme < 0.2, 0, np.where(extreme > 0.8, LAST_NOISE, u)))


def round_trip(x, case, seed=0):
    """x encoded as the case asks, and decoded again, in NumPy."""
    u = hostile_noise(seed, x.shape) if case.stochastic else None
    e = encode(x, case.dtype, group_size=case.group_size, noise=u)
    y = np.asarray(decode(e, group_size=case.group_size))
    codes = np.asarray(e.codes).astype(np.float32)
    return Expanded(codes, np.asarray(e.amax), np.asarray(e.k16)), y


def per_element(of_group, shape, group_size):
    """One number per group, repeated for its members."""
    if not shape:
        return np.asarray(of_group, np.float64)
    return np.repeat(of_group, group_size, axis=-1)[..., : shape[-1]].astype(np.float64)


def exact_image(x, e, case):
    """The magnitude F (|x| / amax)^k of each element in FP64, its k, and the format."""
    fmt = format_of(case.dtype)
    k = per_element(e.k16, x.shape, case.group_size) / 16
    amax = np.maximum(per_element(e.amax, x.shape, case.group_size), SMALLEST)
    return fmt.max * (np.abs(x.astype(np.float64)) / amax) ** k, k, fmt


@functools.cache
def positive_values(dtype):
    """All finite values from 0 up, ascending: a value's place is its code."""
    with np.errstate(invalid="ignore"):
        values = np.arange(128, dtype=np.uint8).view(jnp.dtype(dtype)).astype(np.float64)
    return values[np.isfinite(values)]


def round_exactly(image, dtype, place):
    """Rounds FP64 to the value below ("down"), above ("up") or nearest in the table."""
    table = positive_values(dtype)
    image = np.clip(image, 0, table[-1])
    up = np.searchsorted(table, image)
    down = np.searchsorted(table, image, side="right") - 1
    if place == "nearest":
        return table[np.where(image - table[down] < table[up] - image, down, up)]
    return table[down if place == "down" else up]


@everywhere
@given(regimes=regimes, seed=seeds)
def test_zero_stays_zero(case, regimes, seed):
    x = hostile(regimes, seed, case.shape, case.group_size)
    e, y = round_trip(x, case, seed)
    assert y.shape == e.codes.shape == x.shape
    assert np.all(e.codes[x == 0] == 0)
    assert np.all(y[x == 0] == 0)


@everywhere
@given(regimes=regimes, seed=seeds)
def test_a_non_zero_never_becomes_zero_and_keeps_its_sign(case, regimes, seed):
    x = hostile(regimes, seed, case.shape, case.group_size)
    e, y = round_trip(x, case, seed)
    np.testing.assert_array_equal(np.sign(e.codes), np.sign(x))
    np.testing.assert_array_equal(np.sign(y), np.sign(x))


@everywhere
@given(regimes=regimes, seed=seeds)
def test_the_largest_of_a_group_is_exact(case, regimes, seed):
    x = hostile(regimes, seed, case.shape, case.group_size)
    e, y = round_trip(x, case, seed)
    largest = (np.abs(x) == per_element(e.amax, x.shape, case.group_size)) & (x != 0)
    np.testing.assert_array_equal(y[largest], x[largest])
    np.testing.assert_array_equal(np.abs(e.codes)[largest], format_of(case.dtype).max)
    places = np.arange(x.shape[-1] if x.shape else 1) // case.group_size
    found = np.atleast_1d(largest | (per_element(e.amax, x.shape, case.group_size) == 0))
    assert all(np.all(found[..., places == place].any(-1)) for place in set(places))


@everywhere
@given(
    value=st.floats(SMALLEST, FLOAT32_MAX, width=32),
    zeros=st.sampled_from([0.0, 0.5]),
    seed=seeds,
)
def test_a_constant_group_is_exact(case, value, zeros, seed):
    rng = np.random.default_rng(seed)
    x = rng.choice(np.float32([value, -value, 0]), case.shape, p=[0.5 - zeros / 2] * 2 + [zeros])
    _, y = round_trip(np.asarray(x), case, seed)
    np.testing.assert_array_equal(y, x)


@everywhere
@given(regimes=regimes, seed=seeds)
def test_nothing_non_finite_comes_out_of_finite_numbers(case, regimes, seed):
    x = hostile(regimes, seed, case.shape, case.group_size)
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, x.shape, dtype=np.uint32)  # any float, denormals too
    anything = np.where(np.isfinite(bits.view(np.float32)), bits.view(np.float32), 1e-42)
    x = np.where(rng.random(x.shape) < 0.1, anything, x).astype(np.float32)
    e, y = round_trip(x, case, seed)
    for part in (*e, y):
        assert np.all(np.isfinite(part))


@everywhere
@given(regimes=regimes, seed=seeds)
def test_nan_stays_in_its_own_place(case, regimes, seed):
    x = hostile(regimes, seed, case.shape, case.group_size)
    lost = np.random.default_rng(seed).random(x.shape) < 0.2
    e, y = round_trip(np.where(lost, np.float32(np.nan), x), case, seed)
    e_without, y_without = round_trip(np.where(lost, np.float32(0), x), case, seed)
    np.testing.assert_array_equal(e.amax, e_without.amax)
    np.testing.assert_array_equal(e.k16, e_without.k16)
    np.testing.assert_array_equal(e.codes, np.where(lost, np.nan, e_without.codes))
    np.testing.assert_array_equal(y, np.where(lost, np.nan, y_without))


@everywhere
@given(regimes=regimes, seed=seeds)
def test_infinity_is_the_largest_float32(case, regimes, seed):
    x = hostile(regimes, seed, case.shape, case.group_size)
    beyond = np.random.default_rng(seed).random(x.shape) < 0.2
    sign = np.where(np.signbit(x), -1, 1).astype(np.float32)
    e, y = round_trip(np.where(beyond, sign * np.float32(np.inf), x), case, seed)
    e_largest, y_largest = round_trip(
        np.where(beyond, sign * np.float32(FLOAT32_MAX), x), case, seed
    )
    np.testing.assert_array_equal(y[beyond], sign[beyond] * np.float32(FLOAT32_MAX))
    for got, want in zip((*e, y), (*e_largest, y_largest), strict=True):
        np.testing.assert_array_equal(got, want)


@everywhere
@given(regimes=regimes, seed=seeds)
def test_the_code_is_the_exact_image_rounded(case, regimes, seed):
    """To the nearest value; if stochastically, to one of its two neighbours."""
    x = hostile(regimes, seed, case.shape, case.group_size)
    e, _ = round_trip(x, case, seed)
    image, k, fmt = exact_image(x, e, case)
    image = np.where(x == 0, 0, np.maximum(image, fmt.tiny))
    low, high = image * 2 ** (-k * LOG2_ERROR), image * 2 ** (k * LOG2_ERROR)
    places = ("down", "up") if case.stochastic else ("nearest", "nearest")
    smallest = np.where(x == 0, 0, fmt.tiny)
    assert np.all(
        np.abs(e.codes) >= np.maximum(round_exactly(low, case.dtype, places[0]), smallest)
    )
    assert np.all(np.abs(e.codes) <= round_exactly(high, case.dtype, places[1]))


@everywhere
@given(regimes=regimes, seed=seeds)
def test_the_error_is_that_of_the_code_shrunk_by_k(case, regimes, seed):
    x = hostile(regimes, seed, case.shape, case.group_size)
    e, y = round_trip(x, case, seed)
    image, k, fmt = exact_image(x, e, case)
    nonzero = x != 0
    image, k, x, y = image[nonzero], k[nonzero], np.abs(x[nonzero]), np.abs(y[nonzero])
    image = np.maximum(image, np.finfo(np.float64).tiny)
    # In units of rounding to nearest: half a last place, or half the smallest code.
    units = 2 if case.stochastic else 1
    error = units * np.maximum(2.0 ** -(fmt.mantissa_bits + 1), fmt.tiny / 2 / image)
    # What falls under the smallest code is rounded up to it: the error is all of the way.
    up = np.maximum(np.log2(1 + error), np.log2(fmt.tiny / image))
    down = -np.log2(np.maximum(1 - error, fmt.tiny / np.maximum(image, fmt.tiny)))
    log2_change = np.log2(y.astype(np.float64)) - np.log2(x.astype(np.float64))
    # The image's error reaches x undivided by k, as does one of FP32 in decoding.
    slack = LOG2_ERROR + 2.0**-17
    assert np.all(log2_change <= up / k + slack)
    assert np.all(log2_change >= -down / k - slack)


@everywhere
@given(regimes=regimes, seed=seeds)
def test_the_group_fills_the_format(case, regimes, seed):
    """k is the largest sixteenth that keeps the smallest member in the format.

    To 1/64 of a sixteenth, `expansion.TOLERANCE`: in binades, of which there are R / k, 1/1024
    of them, and what the logarithms leave.
    """
    x = hostile(regimes, seed, case.shape, case.group_size)
    e, _ = round_trip(x, case, seed)
    fmt = format_of(case.dtype)
    assert e.k16.dtype == np.uint8
    assert np.all(e.k16 >= 16)
    image, k, _ = exact_image(x, e, case)
    under = 2 ** (-fmt.log2_range / k / 1024 - k * LOG2_ERROR)
    assert np.all((image >= fmt.tiny * under) | (x == 0) | (k == 1))
    finer = exact_image(x, e._replace(k16=e.k16.astype(np.int64) + 1), case)[0]
    finer = np.where(x == 0, np.inf, finer)
    columns = finer.shape[-1] if finer.ndim else 1
    starts = np.arange(0, columns, case.group_size)
    smallest = np.minimum.reduceat(np.atleast_1d(finer), starts, axis=-1) if columns else finer
    could_grow = (np.atleast_1d(e.k16) < 255) & (np.atleast_1d(e.amax) > 0)
    assert np.all(smallest[could_grow] <= fmt.tiny * 2 ** (16 * LOG2_ERROR))


@pytest.mark.parametrize("case", [case for case in CASES if case.group_size >= 64], ids=str)
def test_zero_at_any_place_of_a_group_changes_nothing(case):
    """One zero among constants, and one non-zero among zeros, at every place."""
    one_place = np.eye(case.group_size, dtype=np.float32)
    if case.shape[-1:] < (case.group_size,):
        one_place = one_place[:, : case.shape[-1] if case.shape else 1]
    for groups in (np.float32(3e-30) * (1 - one_place), np.float32(-0.3) * one_place):
        count = max(1, int(np.prod(case.shape)) // groups.shape[-1])
        for start in range(0, len(groups), count):
            some = np.resize(groups[start : start + count], case.shape)
            np.testing.assert_array_equal(round_trip(some, case, start)[1], some)


@formats
@roundings
def test_what_is_under_the_smallest_counts_as_zero(dtype, stochastic):
    case = Case(*PLAIN, dtype, stochastic)
    under = np.nextafter(np.float32(SMALLEST), np.float32(0))
    x = np.resize(np.array([under, -(2.0**-126), 1e-40, -1e-45], np.float32), case.shape)
    x[2:, ::64] = -7.0
    e, y = round_trip(x, case)
    np.testing.assert_array_equal(y, np.where(x == -7, x, 0))
    np.testing.assert_array_equal(e.amax, [[0] * 4] * 2 + [[7] * 4] * 2)
    np.testing.assert_array_equal(e.k16, [[16] * 4] * 2 + [[255] * 4] * 2)


@formats
@roundings
def test_the_least_that_counts_survives_under_any_largest(dtype, stochastic):
    """2^-125 .. 2^-124 under a largest at any distance: decoding must not underflow."""
    case = Case(*PLAIN, dtype, stochastic)
    for seed, distances in enumerate(np.linspace(0, 34, 64 * 16).reshape(64, 4, 4)):
        x = np.exp2(np.random.default_rng(seed).uniform(-125, -124, (4, 4, 64)))
        x[..., 0] = SMALLEST * np.exp2(distances)
        x[..., 1] = SMALLEST
        _, y = round_trip(x.reshape(case.shape).astype(np.float32), case, seed)
        assert np.all(y > 0)


@formats
@pytest.mark.parametrize("k16", [16, 17, 18, 24, 32, 48, 85, 163, 254, 255])
def test_every_code_survives_another_round_trip(dtype, k16):
    """A group that holds all codes decodes to values whose code is the same, with the same k."""
    table = positive_values(dtype)
    codes = np.zeros((16, 256), np.float32)
    codes[:, : len(table)] = table
    codes[:, 128 : 128 + len(table)] = -table
    # Of any size: the logarithms round differently for each.
    amax = np.geomspace(2.0**-90, FLOAT32_MAX, 16, dtype=np.float32)[:, None]
    stored = Expanded(codes.astype(dtype), amax, np.full((16, 1), k16, np.uint8))
    again = encode(decode(stored, group_size=256), dtype, group_size=256)
    np.testing.assert_array_equal(again.k16, stored.k16)
    np.testing.assert_array_equal(again.amax, amax)
    np.testing.assert_array_equal(np.asarray(again.codes).astype(np.float32), codes)


@formats
def test_round_trips_settle_at_the_second(dtype):
    """Decoding and encoding over and over, as an optimizer does, must not move anything.

    The second trip may choose a larger k, where none of a group got the smallest code.
    After it one has, so k is the same ever after.
    """
    rng = np.random.default_rng(0)
    spread = np.exp2(rng.uniform(-4, 6, (512, 1)))
    place = rng.random((512, 128))
    place[:, :2] = 0, 1
    x = np.exp2(np.maximum(rng.uniform(-60, 100, (512, 1)) - spread * place, -120))

    def once(_, x):
        return expansion.decode(expansion.encode(x, dtype))

    trips = jax.jit(lambda x, count: jax.lax.fori_loop(0, count, once, x))
    two, many = (np.asarray(trips(np.float32(x), count)) for count in (2, 100))
    group = np.argmax(np.abs(np.log2(many / two)).max(-1))
    np.testing.assert_array_equal(many, two, err_msg=f"spread {spread[group]} binades")


@formats
@pytest.mark.parametrize("spread", [0.5, 3.0, 10.0])
def test_stochastic_rounding_is_right_on_average(dtype, spread):
    """The mean of x itself over many keys, each element and all of them together."""
    count, shape = 2048, (4, 128)
    rng = np.random.default_rng(0)
    place = rng.random(shape)
    place[:, :2] = 0, 1
    x = np.float32(np.exp2(-spread * place))

    def samples(step):
        u = noise.uniform(noise.leaf_key(0, step, 0), shape, run=128)
        e = expansion.encode(jnp.asarray(x), dtype, noise=u)
        return expansion.decode(e), e.k16

    many, k16 = jax.jit(jax.vmap(samples))(np.arange(count))
    case = Case(shape, 128, dtype, True)
    stored = Expanded(None, x.max(-1, keepdims=True), np.asarray(k16[0]))
    image, k, fmt = exact_image(x, stored, case)
    low, high = (round_exactly(image, dtype, place) for place in ("down", "up"))
    low = np.maximum(low, fmt.tiny)
    gap = (high / image) ** (1 / k) - (low / image) ** (1 / k)
    drift = np.asarray(many, np.float64).mean(0) / x - 1
    # `formats.stochastic_cast` is right to 0.4 % at worst, where the code is n = 1 in units
    # of its last place, and better with n^2. The smallest may be rounded up by a little.
    code, normal = np.searchsorted(positive_values(dtype), low), 2**fmt.mantissa_bits
    n = np.where(code < normal, code, normal + code % normal)
    allowed = np.maximum(0.004 / n**2, (fmt.tiny / image) ** (1 / k) - 1)
    # A mean of `count` results has a standard deviation of at most half the gap over
    # sqrt(count); beyond six of them lies one in 5e8.
    deviation = gap / 2 / np.sqrt(count)
    assert np.all(np.abs(drift) <= allowed + 6 * deviation)
    assert abs(drift.mean()) <= allowed.mean() + 6 * np.sqrt(np.mean(deviation**2) / x.size)


def test_result_does_not_depend_on_the_leading_shape():
    shape, group_size = PLAIN
    x, u = hostile([(0.0, 12.0, 0.1, 0.5)], 0, *PLAIN), hostile_noise(0, shape)
    want = encode(x, group_size=group_size, noise=u)
    for lead in ((2, 2), (4, 1)):
        new = (*lead, shape[-1])
        got = encode(x.reshape(new), group_size=group_size, noise=u.reshape(new))
        y = decode(got, group_size=group_size)
        flat = (*want, decode(want, group_size=group_size))
        for part, flat_part in zip((*got, y), flat, strict=True):
            assert part.shape[:-1] == lead
            np.testing.assert_array_equal(part.reshape(flat_part.shape), flat_part)


def test_groups_do_not_see_each_other():
    x = hostile([(0.0, 12.0, 0.1, 0.5)], 0, *PLAIN)
    case = Case(*PLAIN, E4M3, True)
    want = round_trip(x, case)
    for group in range(4):
        changed, rest = x.copy(), np.arange(4) != group
        changed[:, 64 * group : 64 * group + 64] *= 1e10
        e, y = round_trip(changed, case)
        for got, reference in zip((e.codes, y), (want[0].codes, want[1]), strict=True):
            kept = got.reshape(4, 4, 64)[:, rest]
            np.testing.assert_array_equal(kept, reference.reshape(4, 4, 64)[:, rest])
        np.testing.assert_array_equal(e.amax[:, rest], want[0].amax[:, rest])
        assert np.all(e.amax[:, group] > want[0].amax[:, group])


def test_result_does_not_depend_on_the_mesh():
    """Also where shards cut groups: 768 columns over 4 or 8 devices, in groups of 128."""
    x = hostile([(0.0, 12.0, 0.1, 0.5)], 0, (16, 768), 128)

    def step(x):
        e = expansion.encode(x)
        u = noise.uniform(noise.leaf_key(0, 3, 1), x.shape, run=128)
        return e, expansion.decode(e), expansion.encode(x, E5M2, noise=u)

    want = jax.tree.leaves(jax.jit(step)(x))
    mesh = Mesh(np.array(jax.devices("cpu")[:8]).reshape(2, 4), ("x", "y"))
    for spec in (P("x", "y"), P(None, ("x", "y"))):
        sharding = NamedSharding(mesh, spec)
        sharded = jax.jit(step)(jax.device_put(x, sharding))
        for got, reference in zip(jax.tree.leaves(sharded), want, strict=True):
            np.testing.assert_array_equal(got, reference)


def test_vmap_and_eager_evaluation_change_nothing():
    """But for images within FP32 rounding of a tie: here are none.

    Decoding ends in exp2 of a number of at most 32, of which FP32 leaves 2^-19.
    """
    shape, size = PLAIN
    x, u = hostile([(0.0, 12.0, 0.1, 0.5)], 0, *PLAIN), hostile_noise(0, shape)
    want = encode(x, group_size=size, noise=u)
    decoded = decode(want, group_size=size)
    eager = expansion.encode(jnp.asarray(x), group_size=size, noise=u)
    mapped = jax.vmap(lambda x, u: encode(x, group_size=size, noise=u))(x, u)
    for got in (eager, mapped):
        jax.tree.map(np.testing.assert_array_equal, got, want)
    np.testing.assert_allclose(expansion.decode(eager, group_size=size), decoded, rtol=2**-18)
    rows = jax.vmap(lambda e: decode(e, group_size=size))(mapped)
    np.testing.assert_allclose(rows, decoded, rtol=2**-18)


def test_fusing_encode_with_decode_keeps_the_rounding():
    """XLA may drop a cast and its inverse where it is told so; here it must not."""
    x = hostile([(0.0, 12.0, 0.1, 0.5)], 0, *PLAIN)
    fused = jax.jit(lambda x: expansion.decode(expansion.encode(x, group_size=64), group_size=64))
    apart = decode(encode(x, group_size=64), group_size=64)
    np.testing.assert_allclose(fused(x), apart, rtol=2**-18)


@pytest.mark.parametrize("source", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_encoded_as_its_float32(source):
    x = np.asarray(hostile([(0.0, 8.0, 0.1, 0.5)], 0, *PLAIN), source)
    got, want = encode(x, group_size=64), encode(x.astype(np.float32), group_size=64)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_dtypes_are_as_documented():
    e = encode(np.ones((3, 200), np.float32), E5M2)
    assert (e.codes.dtype, e.codes.shape) == (E5M2, (3, 200))
    assert (e.amax.dtype, e.amax.shape) == (jnp.float32, (3, 2))
    assert (e.k16.dtype, e.k16.shape) == (jnp.uint8, (3, 2))
    assert decode(e).dtype == jnp.float32


def test_expanded_passes_through_jit_as_a_tree():
    e = encode(np.ones((3, 200), np.float32))
    doubled = jax.jit(lambda e: e._replace(amax=2 * e.amax))(e)
    assert isinstance(doubled, Expanded)
    np.testing.assert_array_equal(decode(doubled), np.full((3, 200), 2.0))
    assert len(jax.tree.leaves(e)) == 3
    shapes = jax.eval_shape(expansion.encode, jax.ShapeDtypeStruct((3, 200), jnp.bfloat16))
    assert [leaf.shape for leaf in shapes] == [leaf.shape for leaf in e]


def test_works_inside_what_is_differentiated():
    """A moment carries no gradient; what is multiplied with it does."""

    def loss(w, m):
        return jnp.sum(w * jax.lax.stop_gradient(expansion.decode(expansion.encode(m * w))))

    w, m = np.full(16, 3, np.float32), np.arange(16, dtype=np.float32)
    gradient = jax.jit(jax.grad(loss))(w, m)
    np.testing.assert_allclose(gradient, decode(encode(w * m)), rtol=2**-18)


@pytest.mark.parametrize("group_size", [0, -1, 1.5, True, "16", None])
def test_a_wrong_group_size_is_refused(group_size):
    with pytest.raises(ValueError, match=r"group_size must be a positive whole number"):
        expansion.encode(jnp.ones(4), group_size=group_size)
    stored = Expanded(jnp.ones(4, E4M3), jnp.ones(1), jnp.full(1, 16, jnp.uint8))
    with pytest.raises(ValueError, match=r"group_size must be a positive whole number"):
        expansion.decode(stored, group_size=group_size)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8, jnp.bool_, jnp.complex64])
def test_only_real_floats_are_encoded(dtype):
    with pytest.raises(TypeError, match=rf"x has dtype {jnp.dtype(dtype).name}.*real floats"):
        expansion.encode(jnp.ones(4, dtype))


def test_only_fp8_is_encoded_to_and_decoded_from():
    with pytest.raises(ValueError, match=r"no FP8 format.*coat\.formats\.E4M3"):
        expansion.encode(jnp.ones(4), jnp.float16)
    stored = Expanded(jnp.ones(4), jnp.ones(1), jnp.full(1, 16, jnp.uint8))
    with pytest.raises(ValueError, match=r"no FP8 format.*coat\.formats\.E4M3"):
        expansion.decode(stored)
