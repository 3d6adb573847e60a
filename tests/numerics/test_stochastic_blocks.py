"""Laws of blocks that are rounded stochastically: up or down at random, right on average."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import coat_jax as coat
from coat_jax import E4M3, E5M2
from coat_jax.numerics import blocks, noise
from coat_jax.numerics.blocks import from_blocks
from coat_jax.numerics.formats import format_of, named_format

to_blocks = jax.jit(blocks.to_blocks, static_argnames=("dtype", "size", "stochastic", "antithetic"))
FORMATS = [E4M3, E5M2, named_format("E3M4"), named_format("E2M1"), named_format("E0M7")]
formats = pytest.mark.parametrize("dtype", FORMATS, ids=lambda f: format_of(f).name)
ROWS, COLUMNS, SIZE = 512, 256, 16


def decoded(x, dtype=E4M3, *, stochastic=True, antithetic=False, size=SIZE):
    found = to_blocks(x, dtype, size=size, stochastic=stochastic, antithetic=antithetic)
    return np.asarray(from_blocks(found, size=size))


@given(seed=st.integers(0, 2**32 - 1))
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["E4M3", "E5M2"])
def test_a_value_becomes_one_of_the_two_codes_around_it(dtype, seed):
    """Of either sign, over twelve binades."""
    rng = np.random.default_rng(seed)
    x = np.float32(rng.standard_normal((8, 64)) * np.exp2(rng.uniform(-12, 0, (8, 64))))
    exponents = to_blocks(x, dtype, size=SIZE, stochastic=True).exponents
    scale = np.repeat(np.exp2(np.float64(exponents) - 127), SIZE, axis=-1)
    fmt = format_of(dtype)
    units = np.abs(x) / scale
    last_place = np.exp2(np.maximum(np.floor(np.log2(units)), fmt.min_exponent) - fmt.mantissa_bits)
    below = np.floor(units / last_place)
    got = np.abs(decoded(x, dtype)) / scale / last_place
    assert np.all((got == below) | (got == below + (units / last_place != below)))
    assert np.all(np.sign(decoded(x, dtype)) * np.sign(x) >= 0)


@formats
@pytest.mark.parametrize("antithetic", [False, True], ids=["", "antithetic"])
@pytest.mark.parametrize("value", [1.03, -0.71, 0.3, 0.0117])
def test_the_mean_of_many_roundings_is_the_value(dtype, value, antithetic):
    """The element beside it sets the scale of all blocks."""
    x = np.full((ROWS, COLUMNS), value, np.float32)
    x[:, ::SIZE] = 1.75
    got = decoded(x, dtype, antithetic=antithetic)
    kept = np.delete(got.reshape(-1, SIZE), 0, axis=1)
    spread = kept.std() / np.sqrt(kept.size)
    assert len(np.unique(kept)) == 2
    assert abs(kept.mean() - value) <= 5 * spread + 1e-7
    nearest = np.delete(decoded(x, dtype, stochastic=False).reshape(-1, SIZE), 0, axis=1)
    assert abs(nearest.mean() - value) > 5 * spread


def test_small_differences_of_large_values_survive():
    """Rounding to nearest loses them: all tokens look the same."""
    rng = np.random.default_rng(0)
    common = rng.uniform(1.02, 1.1, (1, 64))  # codes are 1, 1.125 ..
    x = np.float32(common + np.where(rng.random((4096, 1)) < 0.5, 0, 0.01))
    first = x[:, 0] == x[:, 0].min()

    def found(stochastic):
        """How far the two kinds of rows seem to be apart, beside how far they are."""
        y = decoded(x, stochastic=stochastic)
        return (y[~first].mean() - y[first].mean()) / 0.01

    assert found(stochastic=True) == pytest.approx(1, abs=0.1)
    lost = np.mean(decoded(x, stochastic=False), axis=0, where=first[:, None])
    kept = np.mean(decoded(x, stochastic=False), axis=0, where=~first[:, None])
    assert np.mean(lost == kept) > 0.7


def test_of_two_equal_values_only_one_is_rounded_up_where_one_is_antithetic():
    """Their sum is the value's double to a code, as that of a pair of antithetic variates."""
    x = np.full((ROWS, COLUMNS), 1.03, np.float32)  # between the codes 1 and 1.125
    x[:, ::SIZE] = 1.75
    both = decoded(x) + decoded(x, antithetic=True)
    assert set(np.unique(np.delete(both.reshape(-1, SIZE), 0, axis=1))) <= {2.0, 2.125}


def test_codes_and_zeros_stay():
    codes = np.float32([0.0, -0.0, 1.75, -1.5, 1.125, 0.25, -0.109375, 2.0**-6])
    x = np.tile(codes, (64, 8))
    np.testing.assert_array_equal(decoded(x), x)
    assert np.all(np.signbit(decoded(x)) == np.signbit(x))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_block_that_is_not_finite_is_marked(value):
    x = np.ones((4, 64), np.float32)
    x[2, 20] = value
    found = to_blocks(x, size=SIZE, stochastic=True)
    assert np.asarray(found.exponents)[2, 1] == blocks.NOT_FINITE
    y = decoded(x).copy()
    assert not np.any(np.isfinite(y[2, 16:32]))
    y[2, 16:32] = 1
    np.testing.assert_array_equal(y, 1)


def test_the_largest_magnitude_does_not_grow_beyond_the_format():
    x = np.float32(np.random.default_rng(1).uniform(1.7, 1.75, (256, 64)))
    x[:, ::SIZE] = 1.75
    found = np.asarray(to_blocks(x, size=SIZE, stochastic=True).codes, np.float32)
    assert found.max() == format_of(E4M3).max


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("spec", [P("a"), P("a", "b"), P(None, ("a", "b"))], ids=str)
def test_the_result_does_not_depend_on_the_mesh(spec, kind):
    x = np.float32(np.random.default_rng(2).standard_normal((16, 256)))
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind,) * 2)
    got = to_blocks(jax.device_put(x, NamedSharding(mesh, spec)), size=SIZE, stochastic=True)
    want = to_blocks(x, size=SIZE, stochastic=True)
    np.testing.assert_array_equal(got.codes, want.codes)
    np.testing.assert_array_equal(got.exponents, want.exponents)


@pytest.mark.parametrize("shape", [(3, 5, 64), (2, 40), (24,)])
def test_block_numbers_count_all_blocks_in_order(shape):
    numbers = blocks.block_numbers(shape, SIZE)
    every = np.asarray(numbers.first)[..., None] + np.asarray(numbers.within)
    np.testing.assert_array_equal(every.ravel(), np.arange(every.size))
    np.testing.assert_array_equal(every, noise.run_numbers(every.shape))


@pytest.mark.parametrize("shape", [(2**33, 64), (2, 2**37), (2**37,)])
def test_block_numbers_of_huge_arrays_wrap_around(shape):
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    found = jax.eval_shape(lambda x: blocks.to_blocks(x, size=SIZE, stochastic=True), x)
    assert found.exponents.shape == (*shape[:-1], shape[-1] // SIZE)
    assert jax.eval_shape(lambda: blocks.block_numbers(shape, SIZE)).first.shape == shape[:-1]


@pytest.mark.parametrize("lanes", [16, 128])
def test_the_bits_of_two_lanes_are_independent(lanes):
    """Also where both are small, as is asked where one code is much nearer than the other."""
    bits = np.asarray(noise.of_places(jnp.arange(2**17, dtype=jnp.uint32), lanes))
    uniform = np.float32(bits >> 12) * 2.0**-20
    assert abs(uniform.mean() - 0.5) < 1e-3
    correlation = np.corrcoef(uniform.T, dtype=np.float32) - np.eye(lanes)
    assert np.abs(correlation).max() < 0.02
    p = 2.0**-5
    small = np.float32(uniform < p)
    joint = small.T @ small / len(small) / p**2
    np.fill_diagonal(joint, 1)
    assert 0.6 < joint.min() < joint.max() < 1.4


def test_neighbouring_blocks_and_rows_are_independent():
    bits = np.asarray(noise.of_places(noise.run_numbers((512, 256)), SIZE))
    uniform = np.float32(bits >> 12) * 2.0**-20
    for other in (np.roll(uniform, 1, axis=0), np.roll(uniform, 1, axis=1)):
        assert abs(np.corrcoef(uniform.ravel(), other.ravel())[0, 1]) < 0.005


def test_gradients_see_what_tokens_do_not_have_in_common():
    """The weight's gradient where all tokens are nearly the same, as they are early in training."""
    rng = np.random.default_rng(3)
    tokens, width = 4096, 64
    kind = np.float32(rng.choice([-1, 1], (tokens, 1)))
    x = jnp.asarray(rng.uniform(1, 2, (1, width)) + 0.02 * kind, jnp.float32)
    weight = jnp.zeros((width, 16), jnp.float32)
    wanted = jnp.asarray(kind * rng.standard_normal((1, 16)), jnp.float32)

    def gradient(precision):
        def loss(weight):
            return jnp.sum(
                wanted * coat.ops.norm_linear(x, coat.ops.Norm(), weight, precision=precision)
            )

        return np.asarray(jax.grad(loss)(weight), np.float64)

    exact = gradient(coat.BF16)
    saved = {
        stochastic: coat.Precision(fp8_linear=False, stochastic=stochastic)
        for stochastic in (True, False)
    }
    off = {
        how: np.linalg.norm(gradient(precision) - exact) / np.linalg.norm(exact)
        for how, precision in saved.items()
    }
    assert off[True] < 0.1
    assert off[False] > 0.5
