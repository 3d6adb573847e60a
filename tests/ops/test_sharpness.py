"""The closed form of sharpness is what searches find, and never less."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import ops

V = 8
sharpness = jax.jit(ops.sharpness, static_argnames="epsilon")


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


@pytest.mark.parametrize("epsilon", [5e-4, 1e-2, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_it_is_the_largest_over_all_corners(seed, epsilon):
    """A convex function is largest at a corner of a box."""
    x, label = drawn(seed)
    signs = np.array(list(itertools.product((-1, 1), repeat=V)))
    corners = x + signs * epsilon * (np.abs(x) + 1)
    expected = phi(x, label, loss(corners, label).max())
    found = sharpness(np.float32(x), label, epsilon=epsilon)
    np.testing.assert_allclose(found, expected, rtol=2e-5)


def test_gradient_ascent_within_the_box_ends_there():
    x, label = drawn(7)
    epsilon = 0.05
    box = epsilon * (np.abs(x) + 1)
    of = jax.jit(jax.grad(lambda z: jax.nn.logsumexp(x + z) - (x + z)[label]))
    z = np.zeros(V)
    for _ in range(300):
        z = np.clip(z + 5.0 * np.asarray(of(z)), -box, box)
    found = sharpness(np.float32(x), label, epsilon=epsilon)
    np.testing.assert_allclose(found, phi(x, label, loss(x + z, label)), rtol=1e-3)


def test_every_token_has_its_own():
    x, labels = drawn(1, 2, 5)
    together = sharpness(np.float32(x), labels)
    for place in np.ndindex(2, 5):
        alone = sharpness(np.float32(x[place]), labels[place])
        np.testing.assert_allclose(together[place], alone, rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_large_logits_and_certain_labels_are_fine(dtype):
    x = jnp.zeros((2, V), dtype).at[:, 0].set(300.0)
    right, wrong = sharpness(x, jnp.array([0, 1]), epsilon=1e-3)
    # Of a label that is certain nothing changes; of one that is not, both logits move.
    assert float(right) == pytest.approx(0, abs=1e-6)
    assert float(wrong) == pytest.approx(100 * 1e-3 * (301 + 1) / 301, rel=1e-3)


def test_it_keeps_its_digits_where_the_change_is_small():
    x, label = drawn(3)
    found = sharpness(np.float32(x), label, epsilon=1e-6)
    signs = np.where(np.arange(V) == label, -1, 1)
    corner = x + signs * 1e-6 * (np.abs(x) + 1)
    np.testing.assert_allclose(found, phi(x, label, loss(corner, label)), rtol=1e-4)


def test_it_has_a_gradient():
    x, labels = drawn(1, 4)
    gradient = jax.jit(jax.grad(lambda x: sharpness(x, labels).mean()))(np.float32(x))
    assert np.isfinite(gradient).all()
    assert np.abs(gradient).max() > 0


def test_a_token_without_a_label_has_none():
    x, _ = drawn(1, 2)
    found = sharpness(jnp.float32(x), jnp.array([-100, 3]))
    assert np.isnan(found[0])
    assert np.isfinite(found[1])


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match=r"shape \(3,\). Labels should have shape \(2,\)"):
        ops.sharpness(jnp.ones((2, V)), jnp.zeros(3, int))
    with pytest.raises(ValueError, match="epsilon=0 must be above 0"):
        ops.sharpness(jnp.ones(V), jnp.asarray(1), epsilon=0)


def test_a_label_outside_the_vocabulary_has_no_sharpness():
    logits = jnp.zeros((4, 3))
    found = ops.sharpness(logits, jnp.array([-1, 0, 2, 3]))
    assert list(np.isnan(found)) == [True, False, False, True]
