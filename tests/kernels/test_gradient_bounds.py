"""What bounds the gradients of an activation's inputs: never exceeded, and seldom far above them.

The bound is the largest product of the length of a row of dy, the longest row of the weight, and
what the exponents of a block in the same row of the hidden values allow. Outliers are planted in
channels of gradients and hidden values, in tokens, and in channels of a few tokens.

Where outliers are a few numbers only (`both`), dy and the weight's rows seldom point the same way,
and the bound is looser.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from coat_jax import E4M3, E5M2
from coat_jax.kernels import activation, gemm
from coat_jax.kernels.activation import ACTIVATIONS, Limited
from coat_jax.kernels.cast import columns_per_sum
from coat_jax.numerics.blocks import from_blocks, to_blocks

T, D, F, SIZE = 64, 256, 512, 16
OUTLIERS = {"none": 2.0**6, "channels": 2.0**7, "tokens": 2.0**7, "both": 2.0**8}
DRAWS = [(0, 1.0), (1, 7.0), (2, 50.0), (0, 100.0), (3, 600.0), (0, 1000.0)]  # seeds, factors


def planted(rng, shape, outliers, factor, *, positive=False):
    """Normal numbers, with a few columns, the first rows, or what they share times `factor`."""
    x = rng.standard_normal(shape)
    rows = slice(None) if outliers == "channels" else slice(4)
    columns = slice(None) if outliers == "tokens" else rng.choice(shape[1], 4, replace=False)
    if outliers != "none":
        x[rows, columns] *= factor
        if positive:
            x[rows, columns] = np.abs(x[rows, columns])
    return jnp.asarray(x, jnp.bfloat16)


def measured(x, dtype):
    scale = gemm.tensor_scale(gemm.largest_magnitude(x), dtype)
    return gemm.operand(x, dtype, "straight", "xla", scale=scale, lengths=True)


@jax.jit
def product(dy, w):
    """dy w^T of rounded operands in BF16, and its bound."""
    g, down = measured(dy, E5M2), measured(w, E4M3)
    da = gemm.product_transposed(g, down, jnp.bfloat16)
    return da, gemm.bound_of_product_transposed(g, down)


@jax.jit
def stored(hidden):
    return to_blocks(hidden, size=SIZE)


@functools.cache
def case(seed, factor, outliers):
    """The gradient of an activation and its bound, and what was saved of a gate and an up."""
    rng = np.random.default_rng(seed)
    w = jnp.asarray(rng.standard_normal((F, D)) / F**0.5, jnp.bfloat16)
    da, bound = product(planted(rng, (T, D), outliers, factor), w)
    hidden = [planted(rng, (T, F), outliers, factor, positive=gate) for gate in (True, False)]
    return da, bound, [stored(h) for h in hidden]


@functools.partial(jax.jit, static_argnums=0)
def of_activation(act, da, bound, saved):
    """For each input: its gradient's largest, the bound, and what a scale from the bound costs.

    The cost is the error in E5M2, in units of that with a scale from the largest.
    """
    gradients = activation.activate_backward([from_blocks(b, size=SIZE) for b in saved], da, act)
    found = []
    for gradient, limit in zip(
        gradients, activation.gradient_bounds(saved, bound, act), strict=True
    ):
        largest = gemm.largest_magnitude(gradient)
        searched, bounded = (error(gradient, gemm.tensor_scale(m, E5M2)) for m in (largest, limit))
        found.append((largest, limit, bounded / searched))
    return found


def error(x, scale):
    codes = gemm.operand(x, E5M2, scale=scale).values
    return jnp.linalg.norm(codes.astype(jnp.float32) * scale - x)


@pytest.mark.parametrize("outliers", OUTLIERS)
def test_no_product_exceeds_its_bound(outliers):
    for draw in DRAWS:
        da, bound, _ = case(*draw, outliers)
        assert np.all(np.max(np.abs(np.float32(da)), axis=-1) <= bound)


@pytest.mark.parametrize("act", [*map(Limited, ACTIVATIONS), Limited("silu", 10.0)], ids=str)
@pytest.mark.parametrize("count", [1, 2])
def test_no_gradient_exceeds_its_bound_none_is_far_below_and_accuracy_is_that_of_a_search(
    act, count
):
    """The slope of a gated relu^2 grows with the gate: where the largest gate and the largest up of
    a block are different elements, its bound is off by one of them.
    """
    gated_square = (act.name, count) == ("relu2", 2)
    for outliers, most in OUTLIERS.items():
        for draw in DRAWS:
            da, bound, saved = case(*draw, outliers)
            for largest, limit, cost in of_activation(act, da, bound, saved[:count]):
                assert largest <= limit
                assert gated_square or limit <= most * largest
                assert cost <= 1.001


def test_terms_that_all_agree_reach_their_bound():
    """Where Cauchy and Schwarz are equal, rounding of the sum alone is between the two."""
    dy, w = jnp.ones((8, D)), jnp.ones((F, D)) / 16
    da, bound = product(dy, w)
    smallest, largest = jnp.min(da, axis=-1), jnp.max(da, axis=-1)
    assert jnp.all(largest.astype(jnp.float32) <= bound)
    assert jnp.all(bound <= gemm.SUM_ROUNDING * (1 + 2**-8) * smallest.astype(jnp.float32))


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["E4M3", "E5M2"])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_a_length_is_that_of_the_rounded_row_whatever_its_size(dtype, size):
    """Squares of 1e30 would overflow, those of 1e-30 become zero; codes do neither."""
    x = size * jax.random.normal(jax.random.key(0), (3, 5, 72))
    scale = gemm.tensor_scale(gemm.largest_magnitude(x), dtype)
    operand = gemm.operand(x, dtype, "straight", "xla", scale=scale, lengths=True)
    rounded = np.float64(operand.values) * float(scale)
    np.testing.assert_allclose(operand.lengths, np.linalg.norm(rounded, axis=-1), rtol=1e-6)


WIDTHS = {
    "no mesh": (None, 6656, 16),
    "16 columns on each device": ((1, 8, 1), 128, 16),
    "8 columns on each device": ((1, 8, 1), 64, 8),
    "one column on each device": ((1, 8, 1), 8, 1),
    "26 columns on each device": ((1, 8, 1), 208, 2),
    "two axes that cut": ((1, 4, 2), 64, 8),
    "nothing can cut them": ((1, 8, 1), 33, 16),
}


@pytest.mark.parametrize(("shape", "columns", "wanted"), WIDTHS.values(), ids=WIDTHS)
def test_a_mesh_can_shard_sums_wherever_it_shards_columns(shape, columns, wanted):
    """Otherwise a weight would be gathered as it comes, only to be measured."""
    if shape is None:
        assert columns_per_sum(columns) == wanted
        return
    names = ("data", "fsdp", "tensor")
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * 3)
    with jax.set_mesh(mesh):
        assert columns_per_sum(columns) == wanted


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
@pytest.mark.parametrize("where", ["gradient", "hidden"])
def test_the_bound_of_nan_and_infinity_is_nan(bad, where):
    """The scale becomes NaN, also where the other factor of the bound is zero."""
    gate, up, rows = jnp.zeros((2, 32)), jnp.ones((2, 32)), jnp.zeros(2)
    if where == "gradient":
        up, rows = jnp.zeros((2, 32)), rows.at[1].set(bad)
    else:
        up = up.at[1, 5].set(bad)
    blocks = [to_blocks(h, size=SIZE) for h in (gate, up)]
    limit, _ = activation.gradient_bounds(blocks, rows, Limited("silu"))
    assert jnp.isnan(gemm.tensor_scale(limit, E5M2))


def test_no_rows_have_the_bound_zero():
    saved = [to_blocks(jnp.ones((0, 32)), size=SIZE)]
    assert activation.gradient_bounds(saved, jnp.ones(0), Limited("gelu")) == (0.0,)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_no_value_and_no_slope_exceeds_its_bound_and_the_steepest_nearly_reaches_it(name):
    """Within 1 %: a looser bound would waste codes."""
    x = np.linspace(-8, 8, 20_001, dtype=np.float32)
    x = x[np.argsort(np.abs(x))]

    @jax.jit
    def found(x):
        function = ACTIVATIONS[name]
        both = [jax.vmap(f)(x) for f in (function, jax.grad(function))]
        return both, activation.activation_bounds(jnp.abs(x), name)

    (value, slope), bounds = found(x)
    for each, bound in zip((value, slope), bounds, strict=True):
        largest_up_to_x = np.maximum.accumulate(np.abs(each))
        assert np.all(largest_up_to_x <= np.asarray(bound) * (1 + 1e-6))
    if name in ("gelu", "relu2"):
        assert np.max(np.abs(slope)) > 0.99 * np.max(bounds[1])
