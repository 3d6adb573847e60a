"""What an element goes through in hundreds of steps, beside exact Adam in FP32.

One element of each group of 128 is peculiar: its gradient dies, comes rarely, is tiny or enormous.
The others live on, so that the group's scale does not follow it. What is compared is the sum of
directions: how far a parameter goes, in learning rates.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import quick

import coat_jax as coat
from coat_jax.kernels.adam import largest_direction
from coat_jax.numerics.formats import E4M3, E5M2
from coat_jax.optax import Storage, scale_by_fp8_adam

SHAPE = (32, 128)
FP8 = Storage(min_size=0)
EXPANDED = Storage(min_size=0, first=E4M3, second=E4M3)
STEPS = 600
STEP = np.arange(STEPS)[:, None, None]
PECULIAR = np.arange(128) == 5
NORMAL = np.random.default_rng(0).standard_normal((STEPS, *SHAPE), np.float32)
# Never tiny, and mostly the same sign: a trend, with noise.
TREND = 1 + NORMAL / 2


def dies():
    return np.where(PECULIAR & (STEP > 50), 0, TREND)


def comes_rarely():
    return np.where(PECULIAR & (STEP % 125 != 7), 0, TREND)


def tiny(ratio):
    return np.where(PECULIAR, np.float32(ratio), 1) * NORMAL


def tiny_and_rare(ratio):
    return np.where(PECULIAR & (STEP % 5 != 0), 0, tiny(ratio))


def enormous_once(size):
    return np.where(PECULIAR & (STEP == 20), np.float32(size), NORMAL)


def walker(tx):
    """The program that takes gradients of all steps to what `walk` returns."""

    def body(carry, gradient):
        state, total = carry
        direction, state = tx.update(gradient, state)
        return (state, total + direction), jnp.max(jnp.abs(direction), axis=0)

    start = tx.init(jnp.zeros(SHAPE)), jnp.zeros(SHAPE)
    return jax.jit(lambda g: jax.lax.scan(body, start, g), compiler_options=quick.OPTIMIZED)


@functools.cache
def fp8(b1, b2, storage=FP8):
    return walker(scale_by_fp8_adam(b1, b2, storage=storage))


@functools.cache
def compressed(b1, b2):
    return walker(coat.optax.compress(optax.scale_by_adam(b1, b2), storage=FP8))


@functools.cache
def exact(b1, b2):
    return walker(optax.scale_by_adam(b1, b2))


def walk(program, gradients):
    """The sums of directions, and the largest |direction| of each step."""
    assert gradients.dtype == np.float32
    (_, total), largest = program(gradients)
    return np.asarray(total, np.float64), np.asarray(largest)


SLOW_AND_FAST = [
    (0.9, 0.999, FP8),
    (0.95, 0.95, FP8),
    (0.99, 0.999, FP8),
    (0.0, 0.99, FP8),
    (0.95, 0.95, EXPANDED),
    (0.99, 0.999, EXPANDED),
    (0.9, 0.95, Storage(min_size=0, first=E5M2, second=E4M3)),
    (0.9, 0.999, EXPANDED),
    (0.9, 0.95, FP8),
]


@pytest.mark.costly
@pytest.mark.parametrize(("b1", "b2", "storage"), SLOW_AND_FAST)
def test_an_element_without_gradient_comes_to_rest(b1, b2, storage):
    """Each direction has some 2 % of noise, and v is 3 % off: see docs/rounding_errors.md."""
    programs = fp8(b1, b2, storage), exact(b1, b2)
    if (b1, b2, storage) == SLOW_AND_FAST[-1]:
        programs += (compressed(b1, b2),)
    for gradient in (dies(), comes_rarely()):
        ours, wanted, *others = (walk(p, gradient)[0][:, PECULIAR].mean() for p in programs)
        for found in (ours, *others):
            assert found == pytest.approx(wanted, rel=0.1)


@pytest.mark.parametrize(("b1", "b2"), [(0.95, 0.9), (0.99, 0.978)])
def test_beside_an_element_without_gradient_others_keep_their_codes(b1, b2):
    """Its m / sqrt(v) grows until v vanishes. With 0.99 and 0.95 the error would be 200."""
    ours, wanted = (walk(p(b1, b2), dies())[0][:, ~PECULIAR] for p in (fp8, exact))
    assert np.sqrt(np.mean(np.square(ours - wanted))) <= 10  # learning rates, in 600 steps


@pytest.mark.costly
# Beside eps all ratios under 1e-8 stand still; at 1e-6 the moments are zero at times.
@pytest.mark.parametrize("ratio", [1e-35, 1e-20, 1e-8, 1e-4, 1e-5, 1e-6])
def test_a_tiny_gradient_never_goes_one_way(ratio):
    """Its moments are zero at times, so it may move less or with noise, but not steadily."""
    for gradients in (tiny(ratio), tiny_and_rare(ratio)):
        ours, wanted = (walk(p(0.9, 0.999), gradients)[0][:, PECULIAR] for p in (fp8, exact))
        bound = max(2.5 * np.sqrt(np.mean(np.square(wanted))), 1)
        assert np.sqrt(np.mean(np.square(ours))) <= bound
        # The mean over 32 rows of a walk without trend.
        assert abs(ours.mean()) <= 5 * bound / np.sqrt(len(ours))
    # Compression does not let it explode.
    ours, largest = walk(compressed(0.9, 0.999), tiny_and_rare(ratio))
    assert np.all(largest[:, PECULIAR] <= 8)
    assert np.sqrt(np.mean(np.square(ours[:, PECULIAR]))) <= 60


@pytest.mark.costly
@pytest.mark.parametrize("size", [1e4, 1e12, 1e19, 1e25, 3e38])
def test_an_enormous_gradient_moves_its_neighbours_no_faster(size):
    """It mutes them while its second moment lasts: they are too small beside it to be stored."""
    for b2 in (0.95, 0.999):
        ours, largest = walk(fp8(0.9, b2), enormous_once(size))
        wanted, largest_wanted = walk(exact(0.9, b2), enormous_once(size))
        assert np.all(np.isfinite(ours))
        assert np.all(largest <= 2 * largest_wanted.max())
        neighbours = np.sqrt(np.mean(np.square(wanted[:, ~PECULIAR])))
        assert np.sqrt(np.mean(np.square(ours))) <= 1.1 * neighbours


@pytest.mark.parametrize("nesterov", [False, True])
def test_exact_adam_reaches_the_bound_and_does_not_exceed_it(nesterov):
    """With the gradients for which the Cauchy-Schwarz inequality is an equality; in FP64."""
    for b1, b2 in ((0.9, 0.999), (0.9, 0.95), (0.95, 0.9), (0.0, 0.9)):
        for steps in (1, 2, 7, 40):
            i = np.arange(steps)
            weight = (1 - b1) * b1**i / (1 - b1**steps)
            if nesterov:
                weight = b1 * (1 - b1) * b1**i / (1 - b1 ** (steps + 1))
                weight[0] += (1 - b1) / (1 - b1**steps)
            steepest = weight / b2**i  # of the latest gradient first
            second = (1 - b2) * np.sum(b2**i * steepest**2) / (1 - b2**steps)
            bound = float(largest_direction(jnp.int32(steps), b1, b2, nesterov=nesterov))
            assert np.sum(weight * steepest) / np.sqrt(second) == pytest.approx(bound, rel=1e-4)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("storage", [FP8, EXPANDED], ids=["directions", "expanded"])
def test_no_codes_whatever_make_a_direction_exceed_the_bound(storage, nesterov):
    b1, b2, shape = 0.9, 0.99, (64, 128)

    def anything(rng, moment, dtype, sign):
        codes = rng.integers(0, 127, shape, dtype=np.uint8) | (rng.integers(0, 2, shape) * sign)
        codes = np.where(rng.random(shape) < 0.3, 0, codes).astype(np.uint8)
        amax = np.exp2(rng.uniform(-126, 126, (64, 1))).astype(np.float32)
        amax[::7] = 0
        exponent_x16 = rng.integers(8, 256, (64, 1)).astype(np.uint8)
        return moment._replace(
            codes=jnp.asarray(codes.view(dtype)),
            amax=jnp.asarray(amax),
            exponent_x16=jnp.asarray(exponent_x16),
        )

    for eps in (0.0, 1e-8):
        tx = scale_by_fp8_adam(b1, b2, eps=eps, nesterov=nesterov, storage=storage)
        update, start = jax.jit(tx.update), tx.init(jnp.zeros(shape))
        for count in (0, 1, 30, 100_000):
            rng = np.random.default_rng(count)
            state = start._replace(
                count=jnp.int32(count),
                mu=anything(rng, start.mu, storage.first, 128),
                nu=anything(rng, start.nu, storage.second, 0),
            )
            size = np.exp2(rng.uniform(-140, 127, shape)) * rng.choice([-1, 0, 1], shape)
            direction, after = update(jnp.asarray(size, jnp.float32), state)
            bound = float(largest_direction(jnp.int32(count + 1), b1, b2, nesterov=nesterov))
            # The program computes the bound by itself, to the last bit or the one before.
            assert np.max(np.abs(direction)) <= bound * (1 + 2**-22)
            for leaf in jax.tree.leaves((direction, after)):
                assert np.all(np.isfinite(np.asarray(leaf, np.float32)))


@pytest.mark.parametrize("group_size", [16, 128])
def test_nothing_non_finite_comes_out_of_finite_gradients(group_size):
    tx = scale_by_fp8_adam(0.9, 0.999, eps=0.0, storage=Storage(min_size=0, group_size=group_size))
    params = [jnp.zeros(shape) for shape in ((), (0,), (3, 0), (5,), (3, 129), (2, 3, 40))]
    rng = np.random.default_rng(0)
    state, update = tx.init(params), jax.jit(tx.update)

    def any_float(p):
        bits = rng.integers(0, 2**32, p.shape, dtype=np.uint32)
        found = np.asarray(bits).view(np.float32)
        return jnp.asarray(np.where(np.isfinite(found), found, np.float32(3e38)))

    for _ in range(6):
        direction, state = update(jax.tree.map(any_float, params), state)
        for leaf in jax.tree.leaves((direction, state)):
            assert np.all(np.isfinite(np.asarray(leaf, np.float32)))
