"""Bounds that replace a search for the largest magnitude: never exceeded, and tight."""

import jax
import jax.numpy as jnp
import pytest

from coat_jax.kernels import norm, turn

ROUNDING = 1 + 1e-6
SHIFT = jnp.linspace(-0.5, 0.5, 48)


def of_kind(kind, *, shift):
    scale = jnp.linspace(0.1, 2.0, 48)
    return norm.Norm(scale, SHIFT if shift else None, kind, 1e-12)


@pytest.mark.parametrize(("kind", "shift"), [("rms", False), ("layer", False), ("layer", True)])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_no_row_exceeds_the_bound_of_a_norm(kind, shift, sign):
    """The worst rows have one element only; it may be the one with the largest scale and shift."""
    of = of_kind(kind, shift=shift)
    rows = jnp.concatenate([sign * jnp.eye(48), jax.random.normal(jax.random.key(0), (48, 48))])
    largest = jnp.max(jnp.abs(norm.normalize(rows, norm.statistics(rows, of), of)))
    assert largest <= norm.bound(of, 48) * ROUNDING


@pytest.mark.parametrize(("kind", "shift"), [("rms", False), ("layer", True)])
def test_the_bound_of_a_norm_is_nearly_reached(kind, shift):
    """Within 2 %: of a layer norm's row with one element, 1 - 1 / 48 is left after the mean."""
    of = of_kind(kind, shift=shift)
    rows = jnp.eye(48)
    largest = jnp.max(jnp.abs(norm.normalize(rows, norm.statistics(rows, of), of)))
    assert largest > 0.98 * norm.bound(of, 48)


def test_a_rotated_pair_grows_by_its_bound_and_no_more():
    """(1, 1) rotated by an eighth of a turn becomes (sqrt(2), 0)."""
    angles = jnp.linspace(0, 2 * jnp.pi, 65)[:, None]
    pairs = jnp.broadcast_to(jnp.array([[1.0, 1.0], [1.0, -1.0]]), (1, 65, 2, 2))
    back = turn.turn_back(pairs, jnp.cos(angles), jnp.sin(angles))
    largest = jnp.max(jnp.abs(back))
    assert largest <= turn.GROWTH * ROUNDING
    assert largest > turn.GROWTH / ROUNDING
