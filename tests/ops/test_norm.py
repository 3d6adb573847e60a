"""Laws of norms: the plain formula on x, or in FP8 on what blocks make of x."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from ops_cases import (
    draw,
    plain_norm,
    pulled,
    same_gradients,
    some_norm,
    through,
)

import coat_jax as coat
from coat_jax import ops
from coat_jax.ops.norm import norm_gradient, save_norm
from coat_jax.ops.projection import Mode

KINDS = ("rms", "layer")
D = 40
NORMS = tuple(
    some_norm(kind, D, i, scale=scale, shift=shift, eps=0.5)
    for i, (kind, scale, shift) in enumerate(itertools.product(KINDS, [False, True], [False, True]))
    if kind == "layer" or not shift
)


@pytest.mark.costly
@pytest.mark.parametrize("block", [None, 16, 32])
def test_every_norm_computes_its_formula_from_the_saved_values(block):
    paper = dataclasses.replace(coat.COAT_PAPER, block=block or 16)
    precision = coat.BF16 if block is None else paper

    def f(x, norms):
        return [ops.norm(x, norm, precision=precision) for norm in norms]

    def plain(x, norms):
        values = through(x, precision.forward, precision.block)
        return [plain_norm(values, norm) for norm in norms]

    same_gradients(f, plain, draw(1, (2, 3, D)), NORMS)


def test_eps_keeps_zero_and_small_rows_finite():
    x = jnp.concatenate([jnp.zeros((1, D)), 1e-6 * draw(1, (1, D)), draw(2, (1, D))])
    norms = [ops.Norm(kind=kind, eps=1e-6) for kind in KINDS]
    y, dx, _ = pulled(lambda x: [ops.norm(x, norm) for norm in norms], x)
    for part in jax.tree.leaves((y, dx)):
        assert np.all(np.isfinite(part))
    for rows in y:
        assert np.all(rows[0] == 0)
        # Members of 1e-6 over a root of 1e-6.
        assert np.all(np.abs(rows[1]) <= 1.01e-3 * np.abs(1e6 * x[1]).max())


def test_a_norm_is_a_tree_of_its_parameters():
    """Also of shardings: JAX fills its fields with placeholders, the empty ones as well."""
    norm = some_norm("layer", D, eps=0.25)
    assert len(jax.tree.leaves(norm)) == 2
    doubled = jax.tree.map(lambda leaf: 2 * leaf, norm)
    assert (doubled.kind, doubled.eps) == ("layer", 0.25)
    assert jax.tree.structure(ops.Norm()) != jax.tree.structure(ops.Norm(eps=1e-5))
    sharding = NamedSharding(jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,)), P("a"))
    rms = ops.Norm(jnp.ones(D))
    shardings = jax.tree.map(lambda _: sharding, rms)
    placed = jax.jit(lambda norm: norm, out_shardings=shardings)(rms)
    assert placed.scale.sharding == jax.device_put(rms, shardings).scale.sharding == sharding


@pytest.mark.parametrize("kind", KINDS)
def test_a_residual_gradient_in_bf16_is_added_before_the_only_rounding(kind):
    x, dn, residual = (draw(i, (4, 32, D)).astype(jnp.bfloat16) for i in range(3))
    norm, mode = some_norm(kind, D, 3), Mode(coat.BF16, "xla")
    saved, _ = save_norm(x, norm, mode)
    once, _ = norm_gradient(saved, dn, residual, mode)
    exact, _ = norm_gradient(saved, dn.astype(jnp.float32), residual, mode)
    assert exact.dtype == jnp.float32
    assert np.mean(once == exact.astype(jnp.bfloat16)) > 0.99
