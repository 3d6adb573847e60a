"""Laws of casts that round stochastically, and of the gradients that are rounded by them."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import coat_jax as coat
from coat_jax import E4M3, E5M2, ops
from coat_jax.kernels import gemm
from coat_jax.numerics import noise
from coat_jax.numerics.formats import format_of, named_format

ROWS, COLUMNS = 512, 384
FORMATS = [E4M3, E5M2, named_format("E3M4")]
formats = pytest.mark.parametrize("dtype", FORMATS, ids=lambda f: format_of(f).name)
ONE = np.float32(1)
NAN_OF_GPUS = np.uint32(0x7FFFFFFF).view(np.float32)


@functools.partial(jax.jit, static_argnames=("dtype", "stream"))
def cast(x, dtype, stream="gradients"):
    return gemm.operand(x, dtype, scale=ONE, stream=stream).values


@formats
def test_a_value_becomes_one_of_the_two_codes_around_it(dtype):
    """Of either sign, among the normal codes."""
    fmt = format_of(dtype)
    rng = np.random.default_rng(0)
    lowest, highest = fmt.min_exponent, np.log2(fmt.max)
    x = np.exp2(rng.uniform(lowest, highest, (ROWS, COLUMNS))) * rng.choice([-1, 1], COLUMNS)
    x = np.float32(x)
    got = np.float64(cast(x, dtype))
    place = np.exp2(np.floor(np.log2(np.abs(x))) - fmt.mantissa_bits)
    below = np.floor(np.abs(x) / place) * place
    up = np.abs(got) == np.minimum(below + place, fmt.max)
    assert np.all((np.abs(got) == below) | up)
    assert np.all(np.sign(got) == np.sign(x))
    # Up as often as the part above the lower code says.
    share = np.mean((np.abs(x) - below) / place)
    assert abs(np.mean(up & (got != x)) - share) < 4 * np.sqrt(share / x.size)


@formats
@pytest.mark.parametrize("stream", ["gradients", "inputs"])
def test_the_mean_of_many_roundings_is_the_value(dtype, stream):
    """Over rows and over columns; rounded to nearest it is not."""
    for value in (1.03, -0.71, 3.3):
        x = np.full((ROWS, COLUMNS), value, np.float32)
        got = np.float64(cast(x, dtype, stream=stream))
        assert len(np.unique(got)) == 2
        for axis in (0, 1, (0, 1)):
            means = got.mean(axis)
            count = got.size // means.size
            assert np.max(np.abs(means - value)) < 6 * got.std() / np.sqrt(count)
        nearest = np.float64(cast(x, dtype, stream=None))
        assert abs(nearest.mean() - value) > 6 * got.std() / np.sqrt(got.size)


def test_rows_and_columns_are_rounded_independently():
    up = np.float64(cast(np.full((ROWS, COLUMNS), 1.0625, np.float32), E4M3)) > 1.0625
    centered = up - up.mean()
    for axis in (0, 1):
        along = np.moveaxis(centered, axis, 0)
        for step in (1, 2, 7, 64):
            correlation = np.mean(along[:-step] * along[step:]) / centered.var()
            assert abs(correlation) < 5 / np.sqrt(along[step:].size), (axis, step)


def test_both_operands_of_a_product_are_rounded_independently():
    """So that their errors do not add up where one row of each is multiplied."""
    x = np.full((ROWS, COLUMNS), 1.0625, np.float32)
    up = [np.float64(cast(x, E4M3, stream=stream)) > 1.0625 for stream in ("gradients", "inputs")]
    assert abs(np.corrcoef(up[0].ravel(), up[1].ravel())[0, 1]) < 5 / np.sqrt(x.size)
    of_columns = [np.corrcoef(up[0][:, i], up[1][:, i])[0, 1] for i in range(COLUMNS)]
    assert np.max(np.abs(of_columns)) < 6 / np.sqrt(ROWS)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["E4M3", "E5M2"])
def test_codes_nan_and_zero_stay_and_what_is_too_large_becomes_the_largest_code(dtype):
    """Also a NaN all of whose bits are set, to which adding random bits would give a zero."""
    largest = format_of(dtype).max
    codes = [*np.arange(-448, 449, 64), NAN_OF_GPUS, np.inf, -np.inf, 1e30, -1e30]
    x = np.zeros((ROWS, COLUMNS), np.float32)
    x[: len(codes)] = np.float32(codes)[:, None]
    np.testing.assert_array_equal(np.float32(cast(x, dtype)), np.clip(x, -largest, largest))


def test_a_kernel_can_make_the_random_bits_of_its_shard():
    """From the numbers of its rows and columns, whichever of them it has."""
    shape = (2, 6, 24)
    whole = np.asarray(noise.of_elements(shape, "inputs"))
    rows, columns = noise.element_numbers(shape, "inputs")
    assert (rows.shape, columns.shape) == (shape[:2], shape[2:])
    mine = noise.of_places(rows[1:, 2:4], int(columns[-1]) + 1)[..., columns[8:16]]
    np.testing.assert_array_equal(mine, whole[1:, 2:4, 8:16])


# Of nearly equal tokens.
GRADIENT = np.full((4096, 32), 1.09, np.float32)
GRADIENT[0] = 1.75


@functools.cache
def gradients(precision):
    """The gradients of an identity layer's input and weight, for inputs of one."""

    @jax.jit
    def run(x, w, dy):
        return jax.vjp(lambda x, w: ops.linear(x, w, precision=precision), x, w)[1](dy)

    return run(np.ones((4096, 16), np.float32), np.eye(16, 32, dtype=np.float32), GRADIENT)


STOCHASTIC = dataclasses.replace(coat.COAT, stochastic_backward=True)


def test_the_gradient_of_a_weight_is_right_on_average():
    """A sum over 4096 tokens whose gradients are nearly equal: to nearest, all are equally off."""
    want = np.float64(GRADIENT).sum(0)
    (_, stochastic), (_, nearest) = map(gradients, (STOCHASTIC, coat.COAT))
    # Up (to 1.25) with a probability of 0.36.
    deviation = 0.25 * np.sqrt(4096 * 0.36 * 0.64)
    assert np.max(np.abs(stochastic - want)) < 5 * deviation
    assert np.min(np.abs(nearest - want)) > 4096 * 0.08


def test_gradients_are_rounded_to_nearest_by_default():
    for precision, codes in ((coat.COAT, 1), (coat.COAT_PAPER, 1), (STOCHASTIC, 2)):
        dx, _ = gradients(precision)
        assert len(np.unique(dx[1:])) == codes
