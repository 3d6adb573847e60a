"""Bounds that replace a search for the largest magnitude: never exceeded, and tight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import E4M3, E5M2
from coat_jax.kernels import norm, rotary
from coat_jax.numerics.blocks import from_blocks, to_blocks
from coat_jax.numerics.formats import format_of

ROUNDING = 1 + 1e-6
SHIFT = np.linspace(-0.5, 0.5, 48, dtype=np.float32)


def of_kind(kind, *, shift):
    scale = np.linspace(0.1, 2.0, 48, dtype=np.float32)
    return norm.Norm(scale, SHIFT if shift else None, kind, 1e-12)


@jax.jit
def largest_and_bound(rows, of):
    normed = norm.normalize(rows, norm.statistics(rows, of), of)
    return jnp.max(jnp.abs(normed)), norm.bound_of_norm(of, 48)


@pytest.mark.parametrize(("kind", "shift"), [("rms", False), ("layer", False), ("layer", True)])
def test_no_row_exceeds_the_bound_of_a_norm_and_the_worst_nearly_reaches_it(kind, shift):
    """The worst rows have one element only; it may be the one with the largest scale and shift.

    Within 2 %: of a layer norm's row with one element, 1 - 1 / 48 is left after the mean.
    """
    of = of_kind(kind, shift=shift)
    normal = np.random.default_rng(0).standard_normal((48, 48), np.float32)
    rows = np.concatenate([np.eye(48, dtype=np.float32), normal])
    (largest, bound), (other, _) = (largest_and_bound(sign * rows, of) for sign in (1, -1))
    assert max(largest, other) <= bound * ROUNDING
    assert largest > 0.98 * bound


def test_a_rotated_pair_grows_by_its_bound_and_no_more():
    """(1, 1) rotated by an eighth of a turn becomes (sqrt(2), 0)."""
    angles = np.linspace(0, 2 * np.pi, 65, dtype=np.float32)[:, None]
    pairs = np.broadcast_to(np.float32([[1.0, 1.0], [1.0, -1.0]]), (1, 65, 2, 2))
    back = rotary.rotary_backward(pairs, np.cos(angles), np.sin(angles))
    largest = np.max(np.abs(back))
    assert largest <= rotary.GROWTH * ROUNDING
    assert largest > rotary.GROWTH / ROUNDING


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["E4M3", "E5M2"])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_no_norm_of_saved_values_exceeds_the_bound_with_its_rounding(kind, dtype):
    """With the statistics of exact rows, rounded ones may be longer, and the bound says by what."""
    of = norm.Norm(jnp.linspace(0.1, 2.0, 48), None, kind, 1e-12)
    sizes = jnp.linspace(1.0, 2.0, 97)[:, None, None]
    rows = sizes * jnp.concatenate([jnp.eye(48), -jnp.eye(48)])
    saved = from_blocks(to_blocks(rows, dtype, size=16), size=16)
    largest = jnp.max(jnp.abs(norm.normalize(saved, norm.statistics(rows, of), of)))
    rounding = 2.0 ** -(format_of(dtype).mantissa_bits + 1)
    assert norm.bound_of_norm(of, 48) * ROUNDING < largest
    assert largest <= norm.bound_of_norm(of, 48, rounding) * ROUNDING
