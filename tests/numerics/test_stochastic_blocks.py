"""Laws of blocks that are rounded stochastically: up or down at random, right on average."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coat_jax as coat
from coat_jax import E4M3, E5M2
from coat_jax.numerics import blocks, noise
from coat_jax.numerics.blocks import from_blocks
from coat_jax.numerics.formats import format_of, named_format

to_blocks = jax.jit(blocks.to_blocks, static_argnames=("dtype", "size", "stochastic", "antithetic"))
FORMATS = [E4M3, E5M2, named_format("E3M4"), named_format("E2M1"), named_format("E0M7")]
ROWS, COLUMNS, SIZE = 512, 256, 16


def decoded(x, dtype=E4M3, *, stochastic=True, antithetic=False):
    found = to_blocks(x, dtype, size=SIZE, stochastic=stochastic, antithetic=antithetic)
    return np.asarray(from_blocks(found, size=SIZE))


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["E4M3", "E5M2"])
def test_a_value_becomes_one_of_the_two_codes_around_it(dtype):
    """Of either sign, over twelve binades."""
    rng = np.random.default_rng(0)
    x = np.float32(rng.standard_normal((128, 64)) * np.exp2(rng.uniform(-12, 0, (128, 64))))
    found = to_blocks(x, dtype, size=SIZE, stochastic=True)
    scale = np.repeat(np.exp2(np.float64(found.exponents) - 127), SIZE, axis=-1)
    fmt = format_of(dtype)
    units = np.abs(x) / scale
    last_place = np.exp2(np.maximum(np.floor(np.log2(units)), fmt.min_exponent) - fmt.mantissa_bits)
    below = np.floor(units / last_place)
    y = np.asarray(from_blocks(found, size=SIZE))
    got = np.abs(y) / scale / last_place
    assert np.all((got == below) | (got == below + (units / last_place != below)))
    assert np.all(np.sign(y) * np.sign(x) >= 0)


def test_the_mean_of_many_roundings_is_the_value():
    """In each format, with either sign of its noise; to nearest it is not.

    The element beside it sets the scale of all blocks.
    """
    values = np.float32([1.03, -0.71, 0.3, 0.0117])
    x = np.repeat(values, ROWS)[:, None] + np.zeros(COLUMNS, np.float32)
    x[:, ::SIZE] = 1.75
    ways = [{"stochastic": True}, {"stochastic": True, "antithetic": True}, {"stochastic": False}]

    @jax.jit
    def program(x):
        stored = [[blocks.to_blocks(x, f, size=SIZE, **way) for way in ways] for f in FORMATS]
        return [[from_blocks(one, size=SIZE) for one in of_format] for of_format in stored]

    for of_format in program(x):
        by_value = zip(values, *(np.split(y, 4) for y in of_format), strict=True)
        for value, *found in by_value:
            *at_random, nearest = (np.delete(y.reshape(-1, SIZE), 0, axis=1) for y in found)
            for kept in at_random:
                spread = kept.std() / np.sqrt(kept.size)
                assert len(np.unique(kept)) == 2
                assert abs(kept.mean(dtype=np.float64) - value) <= 5 * spread + 1e-7
                assert abs(nearest.mean(dtype=np.float64) - value) > 5 * spread


def test_of_two_equal_values_only_one_is_rounded_up_where_one_is_antithetic():
    """Their sum is the value's double to a code, as that of a pair of antithetic variates."""
    x = np.full((ROWS, COLUMNS), 1.03, np.float32)  # between the codes 1 and 1.125
    x[:, ::SIZE] = 1.75
    both = decoded(x) + decoded(x, antithetic=True)
    assert set(np.unique(np.delete(both.reshape(-1, SIZE), 0, axis=1))) <= {2.0, 2.125}


def test_codes_zeros_and_what_is_not_finite_stay():
    codes = np.float32([0.0, -0.0, 1.75, -1.5, 1.125, 0.25, -0.109375, 2.0**-6])
    x = np.tile(codes, (64, 8))
    np.testing.assert_array_equal(decoded(x), x)
    assert np.all(np.signbit(decoded(x)) == np.signbit(x))
    lost = x.copy()
    lost[[2, 3, 4], [20, 37, 63]] = np.inf, -np.inf, np.nan
    marked = to_blocks(lost, size=SIZE, stochastic=True).exponents == blocks.NOT_FINITE
    assert marked[2, 1]
    assert marked[3, 2]
    y, in_blocks = decoded(lost), np.repeat(np.asarray(marked), SIZE, axis=-1)
    assert not np.any(np.isfinite(y[in_blocks | np.isnan(lost)]))
    elsewhere = ~in_blocks
    elsewhere[4, 48:] = False  # on CPUs, XLA's maximum may lose a NaN
    np.testing.assert_array_equal(y[elsewhere], x[elsewhere])


def test_the_largest_magnitude_does_not_grow_beyond_the_format():
    x = np.float32(np.random.default_rng(1).uniform(1.7, 1.75, (ROWS, COLUMNS)))
    x[:, ::SIZE] = 1.75
    found = np.asarray(to_blocks(x, size=SIZE, stochastic=True).codes, np.float32)
    assert found.max() == format_of(E4M3).max


@pytest.mark.parametrize("shape", [(3, 5, 64), (2, 40), (24,)])
def test_block_numbers_count_all_blocks_in_order(shape):
    numbers = jax.jit(lambda: blocks.block_numbers(shape, SIZE))()
    every = np.asarray(numbers.first)[..., None] + np.asarray(numbers.within)
    np.testing.assert_array_equal(every.ravel(), np.arange(every.size))
    runs = jax.jit(lambda: noise.run_numbers(every.shape))()
    np.testing.assert_array_equal(every, runs)


@pytest.mark.parametrize("shape", [(2**33, 64), (2, 2**37), (2**37,)])
def test_block_numbers_of_huge_arrays_wrap_around(shape):
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    found = jax.eval_shape(lambda x: blocks.to_blocks(x, size=SIZE, stochastic=True), x)
    assert found.exponents.shape == (*shape[:-1], shape[-1] // SIZE)
    assert jax.eval_shape(lambda: blocks.block_numbers(shape, SIZE)).first.shape == shape[:-1]


@pytest.mark.parametrize("lanes", [16, 64])
def test_the_bits_of_two_lanes_are_independent(lanes):
    """Also where both are small, as is asked where one code is much nearer than the other."""
    p, runs = 2.0**-5, 2**17

    @jax.jit
    def moments():
        bits = noise.of_places(jnp.arange(runs, dtype=jnp.uint32), lanes)
        uniform = (bits >> 12).astype(jnp.float32) * 2.0**-20 - 0.5
        small = (uniform < p - 0.5).astype(jnp.float32)
        return jnp.mean(uniform), uniform.T @ uniform, small.T @ small

    mean, products, joint = (np.asarray(found) for found in moments())
    assert abs(mean) < 1e-3
    correlation = 12 * products / runs - np.eye(lanes)
    assert np.abs(correlation).max() < 0.02
    joint = joint / runs / p**2
    np.fill_diagonal(joint, 1)
    assert 0.6 < joint.min() < joint.max() < 1.4


def test_neighbouring_blocks_and_rows_are_independent():
    bits = jax.jit(lambda: noise.of_places(noise.run_numbers((256, 256)), SIZE))()
    assert np.all(np.any(bits, axis=-1))  # in no block, not even in the first one, all are zero
    uniform = np.float32(np.asarray(bits) >> 12) * 2.0**-20
    for other in (np.roll(uniform, 1, axis=0), np.roll(uniform, 1, axis=1)):
        assert abs(np.corrcoef(uniform.ravel(), other.ravel())[0, 1]) < 0.006


def test_gradients_see_what_tokens_do_not_have_in_common():
    """The weight's gradient where all tokens are nearly the same, as they are early in training."""
    rng = np.random.default_rng(3)
    tokens, width = 1024, 64
    kind = np.float32(rng.choice([-1, 1], (tokens, 1)))
    x = np.float32(rng.uniform(1, 2, (1, width)) + 0.02 * kind)
    wanted = np.float32(kind * rng.standard_normal((1, 16)))

    precisions = [coat.Precision(fp8_linear=False, stochastic=how) for how in (True, False)]

    def loss(weight, precision):
        y = coat.ops.norm_linear(x, coat.ops.Norm(), weight, precision=precision)
        return jnp.sum(wanted * y)

    gradients = jax.jit(lambda w: [jax.grad(loss)(w, p) for p in (coat.BF16, *precisions)])
    exact, *found = map(np.float64, gradients(jnp.zeros((width, 16))))
    stochastic, nearest = (np.linalg.norm(g - exact) / np.linalg.norm(exact) for g in found)
    assert stochastic < 0.1
    assert nearest > 0.5
