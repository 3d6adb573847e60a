"""What bounds the gradients of an activation's inputs: never exceeded, and seldom far above them.

The bound is the largest product of the length of a row of dy, the longest row of the weight, and
what the exponents of a block in the same row of the hidden values allow. Outliers are planted in
channels of gradients and hidden values, in tokens, and in channels of a few tokens.

Two things make it looser. Where outliers are a few numbers only (`both`), dy and the weight's rows
seldom point the same way. And an exponent does not tell a sign: a gate far below zero counts with
its magnitude, although its activation is zero. Neither costs accuracy, as the last tests show.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax.sharding import AxisType

from coat_jax import E4M3, E5M2
from coat_jax.kernels import activation, gemm
from coat_jax.kernels.activation import ACTIVATIONS
from coat_jax.kernels.cast import columns_per_sum
from coat_jax.numerics.blocks import from_blocks, to_blocks

T, D, F, SIZE = 64, 256, 512, 16
OUTLIERS = {"none": 2.0**6, "channels": 2.0**7, "tokens": 2.0**7, "both": 2.0**8}
# How much too large the bound may be. The slope of a gated relu^2 grows with the gate: where the
# largest gate and the largest up of a block are different elements, it is off by one of them.
CASES = [(name, count) for name in ACTIVATIONS for count in (1, 2) if (name, count) != ("relu2", 2)]


def planted(rng, shape, outliers, factor, sign=None):
    """Normal numbers, with a few columns, the first rows, or what they share times `factor`."""
    x = rng.standard_normal(shape)
    rows = slice(None) if outliers == "channels" else slice(4)
    columns = slice(None) if outliers == "tokens" else rng.choice(shape[1], 4, replace=False)
    if outliers != "none":
        x[rows, columns] *= factor
        if sign is not None:
            x[rows, columns] = sign * np.abs(x[rows, columns])
    return jnp.asarray(x, jnp.bfloat16)


def measured(x, dtype):
    scale = gemm.tensor_scale(gemm.largest_magnitude(x), dtype)
    return gemm.scaled_with_lengths(x, scale, dtype, "straight", "xla")


@jax.jit
def product(dy, w):
    """dy w^T of rounded operands in BF16, and its bound."""
    g, down = measured(dy, E5M2), measured(w, E4M3)
    da = gemm.product_transposed(g, down, jnp.bfloat16)
    return da, gemm.bound_of_product_transposed(g, down)


@jax.jit
def stored(hidden):
    return to_blocks(hidden, size=SIZE)


def case(seed, outliers, factor, count, sign=1):
    """The gradient of an activation and its bound, and what was saved of the inputs."""
    rng = np.random.default_rng(seed)
    w = jnp.asarray(rng.standard_normal((F, D)) / F**0.5, jnp.bfloat16)
    da, bound = product(planted(rng, (T, D), outliers, factor), w)
    signs = (sign, None)[:count]
    hidden = [planted(rng, (T, F), outliers, factor, sign) for sign in signs]
    return da, bound, [stored(h) for h in hidden]


def gradients_and_bounds(name, seed, outliers, factor, count, sign=1):
    return of_activation(name, *case(seed, outliers, factor, count, sign))


@functools.partial(jax.jit, static_argnums=0)
def of_activation(name, da, bound, saved):
    gradients = activation.activate_backward([from_blocks(b, size=SIZE) for b in saved], da, name)
    return gradients, activation.gradient_bounds(saved, bound, name)


seeds, factors = st.integers(0, 99), st.floats(1, 1000)


@pytest.mark.parametrize("outliers", OUTLIERS)
@given(seed=seeds, factor=factors)
@example(seed=0, factor=1000.0)
def test_no_product_exceeds_its_bound(outliers, seed, factor):
    da, bound, _ = case(seed, outliers, factor, 0)
    assert jnp.all(jnp.max(jnp.abs(da.astype(jnp.float32)), axis=-1) <= bound)


@pytest.mark.costly
@pytest.mark.parametrize(("name", "count"), CASES)
@pytest.mark.parametrize("outliers", OUTLIERS)
@given(seed=seeds, factor=factors)
@example(seed=0, factor=1000.0)
def test_no_gradient_exceeds_its_bound_and_none_is_far_below(outliers, name, count, seed, factor):
    for gradient, bound in zip(
        *gradients_and_bounds(name, seed, outliers, factor, count), strict=True
    ):
        largest = jnp.max(jnp.abs(gradient))
        assert largest <= bound
        assert bound <= OUTLIERS[outliers] * largest


@pytest.mark.parametrize("outliers", OUTLIERS)
@given(seed=seeds, factor=factors, sign=st.sampled_from([-1, 1]))
@example(seed=0, factor=1000.0, sign=-1)
def test_no_gradient_of_a_gated_square_exceeds_its_bound(outliers, seed, factor, sign):
    pairs = gradients_and_bounds("relu2", seed, outliers, factor, 2, sign)
    for gradient, bound in zip(*pairs, strict=True):
        assert jnp.max(jnp.abs(gradient)) <= bound


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
    operand = gemm.scaled_with_lengths(x, scale, dtype, "straight", "xla")
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


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("outliers", OUTLIERS)
@pytest.mark.parametrize("factor", [100.0, 1000.0])
def test_a_bound_costs_no_accuracy(outliers, factor, name):
    """The error of gradients in E5M2 is that of a search for the largest, to a thousandth."""
    assert_costs_nothing(*gradients_and_bounds(name, 0, outliers, factor, 2))


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("outliers", ["channels", "both"])
def test_gates_far_below_zero_cost_no_accuracy(outliers, name):
    """Nor do they where they are a thousand times as large as those above zero."""
    assert_costs_nothing(*gradients_and_bounds(name, 0, outliers, 1000.0, 2, -1))


def assert_costs_nothing(gradients, bounds):
    for gradient, bound in zip(gradients, bounds, strict=True):
        found, bounded = (
            error(gradient, gemm.tensor_scale(m, E5M2))
            for m in (gemm.largest_magnitude(gradient), bound)
        )
        assert bounded <= 1.001 * found


def error(x, scale, dtype=E5M2):
    codes = gemm.scaled(x, scale, dtype).values
    return jnp.linalg.norm(codes.astype(jnp.float32) * scale - x)


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
    limit, _ = activation.gradient_bounds(blocks, rows, "silu")
    assert jnp.isnan(gemm.tensor_scale(limit, E5M2))


def test_no_rows_have_the_bound_zero():
    saved = [to_blocks(jnp.ones((0, 32)), size=SIZE)]
    assert activation.gradient_bounds(saved, jnp.ones(0), "gelu") == (0.0,)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_value_and_slope_are_at_most_their_bounds_and_the_steepest_nearly_reaches_its(name):
    x = jnp.linspace(-6, 6, 4801)
    value, slope = activation.activation_bounds(jnp.abs(x), name)
    steepness = jnp.abs(jax.vmap(jax.grad(ACTIVATIONS[name]))(x))
    assert np.all(jnp.abs(ACTIVATIONS[name](x)) <= value * (1 + 1e-6))
    assert np.all(steepness <= slope * (1 + 1e-6))
    if name == "gelu":
        assert jnp.max(steepness) > 0.999 * jnp.max(slope)
