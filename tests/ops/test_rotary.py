"""Laws of rotary embeddings: rotations, whose products depend on distances only.

Angles below 128 are off by at most 2^-18 = 4e-6 radians in FP32, and a pair by as much of its
length.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops_cases import assert_close, draw, pulled, quick_jit

from coat_jax import ops
from coat_jax.ops import Llama3Scaling, Rotary

B, S, N, H = 2, 5, 3, 8
X = draw(1, (B, S, N, H))
POSITIONS = jax.device_put(np.int32([0, 1, 7, 50, 100]))
ROTARIES = [Rotary(), Rotary(theta=500.0, scaling=4.0), Rotary(5e5, Llama3Scaling())]


def rotate(x, positions, rotary=ROTARIES[0]):
    return quick_jit(lambda x, positions: ops.rotate(x, positions, rotary))(x, positions)


def turned(x, positions, frequencies):
    """x as complex numbers, times e^(i angle), in FP64."""
    a, b = np.split(np.float64(x), 2, axis=-1)
    angles = np.float64(positions)[..., None, None] * frequencies
    z = (a + 1j * b) * np.exp(1j * angles)
    return np.concatenate([z.real, z.imag], axis=-1)


@pytest.mark.parametrize("rotary", ROTARIES, ids=["plain", "divided", "llama 3"])
def test_pairs_are_complex_numbers_that_rotate(rotary):
    frequencies = np.float64(rotary.frequencies(H))

    def f(x):
        return ops.rotate(x, POSITIONS, rotary)

    y, (dx,), dy = pulled(f, X)
    assert_close(y, turned(X, POSITIONS, frequencies))
    # The gradient is the rotation back.
    assert_close(dx, turned(dy, -POSITIONS, frequencies))


def test_frequencies_fall_from_one_by_powers_of_theta():
    for theta in (1e4, 5e5):
        want = theta ** (-np.arange(0, 128, 2) / 128)
        np.testing.assert_allclose(Rotary(theta).frequencies(128), want, rtol=1e-6)
        np.testing.assert_allclose(Rotary(theta, 8.0).frequencies(128), want / 8, rtol=1e-6)


def test_llama_3_divides_low_frequencies_and_keeps_high_ones():
    """The three ranges of its wavelengths, up to 8192 / 4, from 8192 / 1 on, and between."""
    scaling = Llama3Scaling(factor=8.0)
    plain = np.float64(Rotary(5e5).frequencies(128))
    got = np.float64(Rotary(5e5, scaling).frequencies(128))
    turns = 8192 * plain / (2 * np.pi)  # in the original context
    high, low = turns > 4, turns < 1
    assert high.any()
    assert low.any()
    assert (~high & ~low).any()
    share = np.clip((turns - 1) / 3, 0, 1)
    np.testing.assert_allclose(got[high], plain[high], rtol=0)
    np.testing.assert_allclose(got[low], plain[low] / 8, rtol=1e-6)
    np.testing.assert_allclose(got, plain * (share + (1 - share) / 8), rtol=1e-5)
    assert np.all(np.diff(got) < 0)


def test_position_zero_changes_nothing():
    np.testing.assert_array_equal(rotate(X, jnp.zeros(S, int)), X)


def test_lengths_stay():
    y = rotate(X, POSITIONS)
    np.testing.assert_allclose(np.linalg.norm(y, axis=-1), np.linalg.norm(X, axis=-1), rtol=1e-5)


def test_rotations_add_and_undo():
    both = rotate(rotate(X, POSITIONS), 2 * POSITIONS)
    assert_close(both, rotate(X, 3 * POSITIONS))
    assert_close(rotate(both, -3 * POSITIONS), X)


def test_scores_depend_on_distances_only():
    q, k = X, draw(2, X.shape)

    def scores(shift):
        moved = [rotate(x, POSITIONS + shift) for x in (q, k)]
        return jnp.einsum("bsnh,btnh->bnst", *moved)

    assert_close(scores(27), scores(0))


def test_positions_may_differ_between_sequences():
    each = jnp.stack([POSITIONS, POSITIONS[::-1]])
    want = jnp.concatenate([rotate(X[i : i + 1], each[i]) for i in range(B)])
    assert_close(rotate(X, each), want)


def test_results_have_the_dtype_of_x_and_angles_are_fp32():
    """BF16 holds positions up to 256 only: at 1001 it would turn by 3 radians too little."""
    positions = 1001 + jnp.arange(S)
    x = X.astype(jnp.bfloat16)
    y = rotate(x, positions)
    assert y.dtype == jnp.bfloat16
    assert_close(y, turned(x, positions, np.float64(Rotary().frequencies(H))), 2.0**-8)


def test_only_positions_are_saved():
    _, pull = jax.vjp(lambda x: ops.rotate(x, POSITIONS, Rotary()), X)
    assert all(leaf.size <= POSITIONS.size for leaf in jax.tree.leaves(pull))


def test_llama_3_divides_by_the_bounds_that_it_is_given():
    low, high, factor, context = 2.0, 16.0, 4.0, 1024
    scaling = Llama3Scaling(factor, low, high, context)
    plain = np.float64(Rotary(5e5).frequencies(128))
    turns = context * plain / (2 * np.pi)
    share = np.clip((turns - low) / (high - low), 0, 1)
    wanted = plain * (share + (1 - share) / factor)
    np.testing.assert_allclose(Rotary(5e5, scaling).frequencies(128), wanted, rtol=1e-5)
