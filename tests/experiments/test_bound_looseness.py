"""What bound_looseness compares, on examples that can be computed by hand."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax.kernels.gemm import SUM_ROUNDING
from coat_jax.kernels.norm import Norm, normalize, statistics
from coat_jax.numerics.formats import E5M2
from experiments.bound_looseness import (
    Bounded,
    MLPSite,
    NormSite,
    bounded,
    compare,
    with_outliers,
)

TOKENS, WIDTH, HIDDEN = 8, 16, 32


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def looseness(site: MLPSite | NormSite) -> dict[str, float]:
    return {
        name: compare(of, np.ones(of.values.shape[-1], bool))["looseness"]
        for name, of in bounded(site).items()
    }


def test_bounds_are_as_loose_as_arithmetic_says():
    """Each gradient of the activation is 16, which Cauchy and Schwarz bound by 4 times 4."""
    hidden = jnp.full((TOKENS, HIDDEN), 7.0)  # its values are codes
    aligned = MLPSite(hidden, hidden, jnp.ones((HIDDEN, WIDTH)), jnp.ones((TOKENS, WIDTH)))
    sigmoid = 1 / (1 + math.exp(-7))
    slope = sigmoid * (1 + 7 * (1 - sigmoid))
    expected = {
        "gradient of gate": math.log2(SUM_ROUNDING * 1.13 / slope),
        "gradient of up": math.log2(SUM_ROUNDING / sigmoid),
    }
    assert looseness(aligned) == pytest.approx(expected, abs=2**-7)  # da is in BF16


def test_outliers_leave_the_function_of_an_mlp_and_the_other_columns_of_a_norm():
    hit = np.arange(HIDDEN) == 3
    shapes = (TOKENS, HIDDEN), (TOKENS, HIDDEN), (HIDDEN, WIDTH), (TOKENS, WIDTH)
    mlp = MLPSite(*(normal(seed, *shape) for seed, shape in enumerate(shapes)))
    changed = with_outliers(mlp, hit, 64.0)
    outputs = [jax.nn.silu(one.gate) * one.up @ one.down for one in (mlp, changed)]
    np.testing.assert_allclose(*outputs, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(changed.down[hit], 64 * mlp.down[hit])
    norm = NormSite(normal(0, TOKENS, HIDDEN), Norm(1 + normal(1, HIDDEN) / 8))
    before, after = (
        normalize(one.x, statistics(one.x, one.norm), one.norm)
        for one in (norm, with_outliers(norm, hit, 64.0))
    )
    np.testing.assert_allclose(after / before, np.where(hit, 64.0, 1.0)[None].repeat(8, 0))


def test_a_loose_bound_makes_small_values_subnormal():
    """The scale is 2^-15 for 1 and 2^-5 for 2^10; the smallest normal code of E5M2 is 2^-14."""
    values = jnp.array([[1.0, 0.0, 2.0**-10, 1.25 * 2.0**-20]])
    others = np.array([False, True, True, True])
    found = compare(Bounded(values, jnp.float32(2**10), E5M2), others)
    assert found["looseness"] == 10
    assert found["error, largest"] == 0
    # Of 2.5 of the smallest codes, 2 are left.
    assert found["error, bound"] == pytest.approx(2.0**-22 / 2.0**-10, rel=1e-5)


def test_a_bound_that_is_exceeded_is_an_error():
    with pytest.raises(ValueError, match=r"1\.0 exceeds its bound 0\.5"):
        compare(Bounded(jnp.ones((1, 2)), jnp.float32(0.5), E5M2), np.ones(2, bool))
