"""What the laws of dynamic range expansion are tried on, and their oracle.

The oracle is the exact image F (|x| / amax)^k, computed in FP64 with the k that was stored,
and the table of the format's values. JAX computes the image through two FP32 logarithms of
at most 128 in magnitude, so of 2^-17 in the last place: together, four last places, their
difference is good to LOG2_ERROR = 2^-15, which k multiplies in the image.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick

from coat_jax.numerics import expansion
from coat_jax.numerics.expansion import Expanded
from coat_jax.numerics.formats import E4M3, E5M2, format_of

SMALLEST = 2.0**-126
FLOAT32_MAX = float(np.finfo(np.float32).max)
LAST_NOISE = 1 - 2.0**-23  # the largest number that `noise.uniform` gives
LOG2_ERROR = 2.0**-15
DRAWS = 15  # arrays of hostile numbers that each law is tried on

compiled = functools.partial(
    jax.jit, static_argnames=("dtype", "group_size"), compiler_options=quick.OPTIMIZED
)
encode = compiled(expansion.encode)
decode = jax.jit(expansion.decode, static_argnames="group_size")
formats = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["E4M3", "E5M2"])

# Nothing, rank 0, rank 3 with a tail of one, whole groups.
SHAPES = [((3, 0), 32), ((), 128), ((2, 3, 65), 32), ((4, 256), 64)]
PLAIN = SHAPES[-1]  # for laws that do not care, to spare a compilation


class Case(NamedTuple):
    shape: tuple[int, ...]
    group_size: int
    dtype: Any
    rounding: str

    def __str__(self):
        return f"{self.shape}/{self.group_size}-{format_of(self.dtype).name}-{self.rounding}"


class Draw(NamedTuple):
    x: np.ndarray
    e: Expanded
    y: np.ndarray  # decoded


# A shape and a format have nothing to do with each other: the last one does for E5M2.
CASES = [
    Case(shape, group_size, dtype, rounding)
    for dtype, shapes in ((E4M3, SHAPES), (E5M2, [PLAIN]))
    for shape, group_size in shapes
    for rounding in ("nearest", "stochastic", "dithered")
]
UNDITHERED = [case for case in CASES if case.rounding != "dithered"]


def hostile(seed, shape, group_size, regime=None):
    """Values in 0, 2^-126 .. 3.4e38 and their negatives.

    Each group has a regime: log2 of its largest, binades down to its smallest, share of zeros,
    share of negatives. If none is given, each is drawn, often from special ones. The special
    spreads are around what fits k = 255/16, k = 1 and k = 1/2.
    """
    rng = np.random.default_rng(seed)
    columns = shape[-1] if shape else 1
    rows, groups = int(np.prod(shape[:-1], dtype=int)), -(-columns // group_size)
    size = (rows, groups, 1)
    if regime is None:
        top = np.where(rng.random(size) < 0.5, rng.uniform(-126, 128, size), 0)
        top = np.where(rng.random(size) < 0.3, rng.choice([-126.0, -105.5, 128.0], size), top)
        spread = rng.choice([0.0, 1.11, 17.77, 31.8, 253.0], size)
        spread = np.where(rng.random(size) < 0.5, rng.uniform(0, 40, size), spread)
        zeros, negative = rng.choice([0.0, 0.0, 0.1, 0.9], size), rng.choice([0, 0.5, 1], size)
    else:
        top, spread, zeros, negative = regime
    place = rng.random((rows, groups, group_size))
    place = np.where(place < 0.1, 0, np.where(place > 0.9, 1, place))
    x = np.exp2(np.clip(top - spread * place, -126, np.log2(FLOAT32_MAX)))
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


@compiled
def every_rounding(x, noise, dtype, group_size):
    """x encoded in each way, and decoded again, in one program."""
    dithered = expansion.encode(x, dtype, group_size=group_size, noise=noise, dithered=True)
    encoded = {"dithered": dithered}
    for name, never_zero in (("", False), (" divisor", True)):
        for rounding, own in (("nearest", None), ("stochastic", noise)):
            encoded[rounding + name] = expansion.encode(
                x, dtype, group_size=group_size, noise=own, never_zero=never_zero
            )
    return {
        name: (
            e._replace(codes=e.codes.astype(jnp.float32)),
            expansion.decode(e, group_size=group_size),
        )
        for name, e in encoded.items()
    }


def round_trip(x, case, seed=0):
    """x encoded as the case asks, and decoded again, in NumPy."""
    noise = hostile_noise(seed, x.shape)
    e, y = every_rounding(x, noise, case.dtype, case.group_size)[case.rounding]
    return Expanded(*map(np.asarray, e)), np.asarray(y)


@functools.cache
def draws(case):
    """Hostile numbers, encoded as the case asks, and decoded again."""
    xs = [hostile(seed, case.shape, case.group_size) for seed in range(DRAWS)]
    return [Draw(x, *round_trip(x, case, seed)) for seed, x in enumerate(xs)]


def per_element(of_group, shape, group_size):
    """One number per group, repeated for its members."""
    if not shape:
        return np.asarray(of_group, np.float64)
    return np.repeat(of_group, group_size, axis=-1)[..., : shape[-1]].astype(np.float64)


def smallest_of_groups(x, group_size):
    """The smallest number of each group."""
    columns = x.shape[-1] if x.ndim else 1
    starts = np.arange(0, columns, group_size)
    return np.minimum.reduceat(np.atleast_1d(x), starts, axis=-1) if columns else x


def exact_image(x, e, case):
    """The magnitude F (|x| / amax)^k of each element in FP64, its k, and the format."""
    fmt = format_of(case.dtype)
    k = per_element(e.exponent_x16, x.shape, case.group_size) / 16
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
