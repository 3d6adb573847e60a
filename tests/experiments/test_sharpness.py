"""The closed form of sharpness is the largest over a box, and never less."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.stability.sharpness import sharpness

V = 8


def drawn(seed, *shape, scale=3.0):
    rng = np.random.default_rng(seed)
    return scale * rng.standard_normal((*shape, V)), rng.integers(V, size=shape)


def loss(x, label):
    """In FP64."""
    top = x.max(-1, keepdims=True)
    lse = np.log(np.exp(x - top).sum(-1)) + top[..., 0]
    return lse - x[..., label]


def phi(x, label, largest):
    return 100 * (largest - loss(x, label)) / (1 + loss(x, label))


def test_of_each_token_it_is_the_largest_over_all_corners():
    """A convex function is largest at a corner of a box. At 1e-6 FP64's own digits end."""
    xs, labels = drawn(1, 2, 4)
    sizes = 1e-6, 5e-4, 1e-2, 1.0
    every = jax.jit(lambda x: [sharpness(x, labels, epsilon=size) for size in sizes])
    signs = np.array(list(itertools.product((-1, 1), repeat=V)))
    for epsilon, found in zip(sizes, every(np.float32(xs)), strict=True):
        for place in np.ndindex(2, 4):
            x, label = xs[place], labels[place]
            corners = x + signs * epsilon * (np.abs(x) + 1)
            wanted = phi(x, label, loss(corners, label).max())
            np.testing.assert_allclose(found[place], wanted, rtol=2e-5 if epsilon > 1e-5 else 1e-4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_large_logits_and_certain_labels_are_fine(dtype):
    x = np.zeros((2, V), dtype)
    x[:, 0] = 300.0
    right, wrong = sharpness(x, jnp.array([0, 1]), epsilon=1e-3)
    # Of a label that is certain nothing changes; of one that is not, both logits move.
    assert float(right) == pytest.approx(0, abs=1e-6)
    assert float(wrong) == pytest.approx(100 * 1e-3 * (301 + 1) / 301, rel=1e-3)
