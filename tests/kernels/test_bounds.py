"""Bounds that replace a search for the largest magnitude: never exceeded, and tight."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import E4M3, E5M2
from coat_jax.kernels import gemm, norm, rotary
from coat_jax.numerics.blocks import from_blocks, to_blocks
from coat_jax.numerics.formats import format_of

ROUNDING = 1 + 1e-6
SHIFT = np.linspace(-0.5, 0.5, 48, dtype=np.float32)


def of_kind(kind, *, shift):
    scale = np.linspace(0.1, 2.0, 48, dtype=np.float32)
    return norm.Norm(scale, SHIFT if shift else None, kind, 1e-12)


@pytest.mark.parametrize(("kind", "shift"), [("rms", False), ("layer", False), ("layer", True)])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_no_row_exceeds_the_bound_of_a_norm(kind, shift, sign):
    """The worst rows have one element only; it may be the one with the largest scale and shift."""
    of = of_kind(kind, shift=shift)
    rows = jnp.concatenate([sign * jnp.eye(48), jax.random.normal(jax.random.key(0), (48, 48))])
    largest = jnp.max(jnp.abs(norm.normalize(rows, norm.statistics(rows, of), of)))
    assert largest <= norm.bound_of_norm(of, 48) * ROUNDING


@pytest.mark.parametrize(("kind", "shift"), [("rms", False), ("layer", True)])
def test_the_bound_of_a_norm_is_nearly_reached(kind, shift):
    """Within 2 %: of a layer norm's row with one element, 1 - 1 / 48 is left after the mean."""
    of = of_kind(kind, shift=shift)
    rows = jnp.eye(48)
    largest = jnp.max(jnp.abs(norm.normalize(rows, norm.statistics(rows, of), of)))
    assert largest > 0.98 * norm.bound_of_norm(of, 48)


def test_a_rotated_pair_grows_by_its_bound_and_no_more():
    """(1, 1) rotated by an eighth of a turn becomes (sqrt(2), 0)."""
    angles = np.linspace(0, 2 * np.pi, 65, dtype=np.float32)[:, None]
    pairs = np.broadcast_to(np.float32([[1.0, 1.0], [1.0, -1.0]]), (1, 65, 2, 2))
    back = rotary.rotary_backward(pairs, np.cos(angles), np.sin(angles))
    largest = np.max(np.abs(back))
    assert largest <= rotary.GROWTH * ROUNDING
    assert largest > rotary.GROWTH / ROUNDING


def error(x, scale, dtype):
    codes = gemm.scaled(x, scale, dtype).values
    return jnp.linalg.norm(codes.astype(jnp.float32) * scale - x)


@functools.partial(jax.jit, static_argnums=2)
def cost(x, bound, dtype):
    """How much larger the error in FP8 is with a scale from the bound than with a searched one."""
    found = gemm.tensor_scale(gemm.largest_magnitude(x), dtype)
    return error(x, gemm.tensor_scale(bound, dtype), dtype) / error(x, found, dtype)


@pytest.mark.parametrize("factor", [1.0, 100.0, 1000.0])
@pytest.mark.parametrize("outliers", ["in the input", "in the norm's scale", "in both"])
def test_the_bound_of_a_norm_costs_no_accuracy(outliers, factor):
    """Up to scales of 100 times the others; 1000 times cost a tenth, where E4M3 spans 2^15."""
    rows, columns = 256, 1024
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, columns), np.float32)
    scale = 1 + rng.standard_normal(columns, np.float32) / 8
    if outliers != "in the norm's scale":
        x[:, 7] *= factor
    if outliers != "in the input":
        scale[7 if outliers == "in both" else 100] *= factor
    of = norm.Norm(scale)
    y = norm.normalize(x, norm.statistics(x, of), of)
    limit = 1.1 if factor == 1000 else 1.01
    assert cost(y, norm.bound_of_norm(of, columns), E4M3) <= limit


@pytest.mark.parametrize("factor", [1.0, 1000.0])
def test_the_bound_of_a_rotation_costs_no_accuracy(factor):
    dy = np.random.default_rng(0).standard_normal((2, 64, 4, 32), np.float32)
    dy[:, :, 1, 3] *= factor
    angles = np.float32(np.arange(64)[:, None] * 10000.0 ** (-np.arange(16) / 16))
    back = rotary.rotary_backward(dy, np.cos(angles), np.sin(angles))
    assert cost(back, rotary.GROWTH * gemm.largest_magnitude(dy), E5M2) <= 1.001


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
