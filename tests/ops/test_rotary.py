"""Laws of rotary embeddings: pairs of numbers are complex ones that rotate.

Angles below 128 are off by at most 2^-18 = 4e-6 radians in FP32, and a pair by as much of its
length.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops_cases import assert_close, draw, pulled

from coat_jax import ops
from coat_jax.ops import Llama3Scaling, Rotary

B, S, N, H = 2, 5, 3, 8
X = draw(1, (B, S, N, H))
POSITIONS = np.int32([0, 1, 7, 50, 100])
ROTARIES = [Rotary(), Rotary(theta=500.0, scaling=4.0), Rotary(5e5, Llama3Scaling())]


def rotated(x, positions, frequencies):
    """x as complex numbers, times e^(i angle), in FP64."""
    a, b = np.split(np.float64(x), 2, axis=-1)
    angles = np.float64(positions)[..., None, None] * frequencies
    z = (a + 1j * b) * np.exp(1j * angles)
    return np.concatenate([z.real, z.imag], axis=-1)


def frequencies_of(rotary, head_dim):
    """The angles at position one, in FP64."""
    cos, sin = rotary.cos_sin(np.ones((1,), np.int32), head_dim)
    return np.arctan2(np.float64(sin[0]), np.float64(cos[0]))


def test_pairs_are_complex_numbers_that_rotate():
    """With positions of all sequences or of each. The gradient is the rotation back."""
    places = POSITIONS, np.stack([POSITIONS, POSITIONS[::-1]])
    cases = [(rotary, at) for rotary in ROTARIES for at in places]

    def f(xs):
        return [ops.rotate(x, at, rotary) for x, (rotary, at) in zip(xs, cases, strict=True)]

    y, (dx,), dy = pulled(f, [X] * len(cases))
    for i, (rotary, at) in enumerate(cases):
        frequencies = frequencies_of(rotary, H)
        assert_close(y[i], rotated(X, at, frequencies))
        assert_close(dx[i], rotated(dy[i], -at, frequencies))
        np.testing.assert_array_equal(y[i][0, 0], X[0, 0])  # at position zero


def test_frequencies_fall_from_one_by_powers_of_theta():
    for theta in (1e4, 5e5):
        want = theta ** (-np.arange(0, 128, 2) / 128)
        np.testing.assert_allclose(frequencies_of(Rotary(theta), 128), want, rtol=1e-6)
        np.testing.assert_allclose(frequencies_of(Rotary(theta, 8.0), 128), want / 8, rtol=1e-6)


@pytest.mark.parametrize(
    "scaling", [Llama3Scaling(factor=8.0), Llama3Scaling(4.0, 2.0, 16.0, 1024)], ids=str
)
def test_llama_3_divides_low_frequencies_and_keeps_high_ones(scaling):
    """By how often they turn in the original context: up to one bound, from another on, between."""
    plain = frequencies_of(Rotary(5e5), 128)
    got = frequencies_of(Rotary(5e5, scaling), 128)
    turns = scaling.original_context * plain / (2 * np.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share = np.clip((turns - low) / (high - low), 0, 1)
    assert len(np.unique(share)) > 2
    np.testing.assert_allclose(got[share == 1], plain[share == 1], rtol=0)
    np.testing.assert_allclose(got, plain * (share + (1 - share) / scaling.factor), rtol=1e-5)


def test_results_have_the_dtype_of_x_and_angles_are_fp32():
    """BF16 holds positions up to 256 only: at 1001 it would turn by 3 radians too little."""
    positions = 1001 + np.arange(S)
    x = X.astype(jnp.bfloat16)
    y = jax.jit(lambda x: ops.rotate(x, positions, Rotary()))(x)
    assert y.dtype == jnp.bfloat16
    assert_close(y, rotated(x, positions, frequencies_of(Rotary(), H)), 2.0**-8)


def test_only_positions_are_saved():
    _, pull = jax.vjp(lambda x: ops.rotate(x, POSITIONS, Rotary()), X)
    assert all(leaf.size <= POSITIONS.size for leaf in jax.tree.leaves(pull))
