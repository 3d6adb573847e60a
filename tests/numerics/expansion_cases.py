"""What the laws of dynamic range expansion are tried on, and their oracle.

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
import quick
from hypothesis import strategies as st

from coat_jax.numerics import expansion
from coat_jax.numerics.expansion import Expanded
from coat_jax.numerics.formats import E4M3, E5M2, format_of

SMALLEST = 2.0**-126
HEADROOM = 2  # binades under the smallest element, where rounding is stochastic
FLOAT32_MAX = float(np.finfo(np.float32).max)
LAST_NOISE = 1 - 2.0**-23  # the largest number that `noise.uniform` gives
LOG2_ERROR = 2.0**-15
MAX_LOG2_X = float(np.log2(FLOAT32_MAX))

compiled = functools.partial(
    jax.jit, static_argnames=("dtype", "group_size"), compiler_options=quick.OPTIMIZED
)
encode = compiled(expansion.encode)
encode_dithered = compiled(expansion.encode_dithered)
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
    for dtype, menu in ((E5M2, MENU[-3:]), (E4M3, MENU))
    for shape, group_size in menu
    for stochastic in (False, True)
]
everywhere = pytest.mark.parametrize("case", CASES, ids=str)

# What a group looks like: log2 of its largest, binades down to its smallest (the special
# ones are around what fits k = 255/16, k = 1 and k = 1/2), share of zeros, share of negatives.
regimes = st.lists(
    st.tuples(
        st.one_of(st.floats(-126, 128), st.sampled_from([-126.0, -105.5, 0.0, 128.0])),
        st.one_of(st.floats(0, 40), st.sampled_from([0.0, 1.11, 17.77, 31.8, 253.0])),
        st.sampled_from([0.0, 0.0, 0.1, 0.9]),
        st.sampled_from([0.0, 0.5, 1.0]),
    ),
    min_size=1,
    max_size=4,
)
seeds = st.integers(0, 2**32 - 1)


def hostile(regimes, seed, shape, group_size):
    """Values in 0, 2^-126 .. 3.4e38 and their negatives; the groups take turns at the regimes."""
    rng = np.random.default_rng(seed)
    columns = shape[-1] if shape else 1
    groups = -(-columns // group_size)
    rows = int(np.prod(shape[:-1], dtype=int))
    which = np.arange(rows * groups).reshape(rows, groups, 1) % len(regimes)
    top, spread, zeros, negative = np.moveaxis(np.array(regimes)[which], -1, 0)
    place = rng.choice([0.0, 1.0, np.nan], size=(rows, groups, group_size), p=[0.1, 0.1, 0.8])
    place = np.where(np.isnan(place), rng.random(place.shape), place)
    x = np.exp2(np.clip(top - spread * place, -126, MAX_LOG2_X))
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


def encoded(x, case, seed=0, *, never_zero=False):
    """x encoded as the case asks, by one program for divisors and others."""
    u = hostile_noise(seed, x.shape) if case.stochastic else None
    return encode(x, case.dtype, group_size=case.group_size, noise=u, never_zero=never_zero)


def round_trip(x, case, seed=0):
    """x encoded as the case asks, and decoded again, in NumPy."""
    e = encoded(x, case, seed)
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
