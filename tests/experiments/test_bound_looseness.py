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


def aligned() -> MLPSite:
    """Rows of dy and of the weight that point the same way, and hidden values that are codes."""
    hidden = jnp.full((TOKENS, HIDDEN), 7.0)
    return MLPSite(hidden, hidden, jnp.ones((HIDDEN, WIDTH)), jnp.ones((TOKENS, WIDTH)))


def looseness(site: MLPSite | NormSite) -> dict[str, float]:
    everywhere = {name: np.ones(of.values.shape[-1], bool) for name, of in bounded(site).items()}
    return {n: compare(of, everywhere[n])["looseness"] for n, of in bounded(site).items()}


def test_bounds_are_as_loose_as_arithmetic_says():
    """Each gradient of the activation is 16, which Cauchy and Schwarz bound by 4 times 4."""
    sigmoid = 1 / (1 + math.exp(-7))
    slope = sigmoid * (1 + 7 * (1 - sigmoid))
    expected = {
        "gradient of gate": math.log2(SUM_ROUNDING * 1.13 / slope),
        "gradient of up": math.log2(SUM_ROUNDING / sigmoid),
    }
    found = looseness(aligned())
    assert found == pytest.approx(expected, abs=2**-7)  # da is in BF16


def test_the_bound_of_a_norm_is_looser_by_the_rounding_of_its_input():
    found = looseness(NormSite(jnp.eye(WIDTH), Norm(jnp.ones(WIDTH), eps=1e-12)))
    assert found["norm's output"] == pytest.approx(math.log2(1 + 2**-4), abs=1e-5)


@pytest.mark.parametrize("place", ["up", "down"])
def test_outliers_of_an_mlp_make_bounds_looser_and_leave_its_function(place):
    site = MLPSite(
        normal(0, TOKENS, HIDDEN),
        normal(1, TOKENS, HIDDEN),
        normal(2, HIDDEN, WIDTH),
        normal(3, TOKENS, WIDTH),
    )
    hit = np.arange(HIDDEN) == 3
    changed = with_outliers(site, place, hit, 64.0)

    def output(site: MLPSite) -> jax.Array:
        return jax.nn.silu(site.gate) * site.up @ site.down

    np.testing.assert_allclose(output(changed), output(site), rtol=1e-5, atol=1e-5)
    larger, before = (changed.up, site.up) if place == "up" else (changed.down.T, site.down.T)
    np.testing.assert_array_equal(larger[:, hit], 64 * before[:, hit])
    gate = "gradient of gate"
    assert looseness(changed)[gate] > looseness(site)[gate] + 3


def test_outliers_of_a_norm_leave_its_other_columns():
    x, hit = normal(0, TOKENS, WIDTH), np.arange(WIDTH) == 3
    site = NormSite(x, Norm(1 + normal(1, WIDTH) / 8))
    changed = with_outliers(site, "norm's scale", hit, 64.0)
    before, after = (normalize(s.x, statistics(s.x, s.norm), s.norm) for s in (site, changed))
    np.testing.assert_allclose(after / before, np.where(hit, 64.0, 1.0)[None].repeat(8, 0))


def test_a_loose_bound_makes_small_values_subnormal():
    """The scale is 2^-15 for 1 and 2^-5 for 2^10; the smallest normal code of E5M2 is 2^-14."""
    values = jnp.array([[1.0, 0.0, 2.0**-10, 1.25 * 2.0**-20]])
    others = np.array([False, True, True, True])
    found = compare(Bounded(values, jnp.float32(2**10), E5M2), others)
    assert found["looseness"] == 10
    assert found["small, bound"] == 0.5
    assert found["small, largest"] == found["error, largest"] == 0
    # Of 2.5 of the smallest codes, 2 are left.
    assert found["error, bound"] == pytest.approx(2.0**-22 / 2.0**-10, rel=1e-5)


def test_a_bound_that_is_exceeded_is_an_error():
    with pytest.raises(ValueError, match=r"1\.0 exceeds its bound 0\.5"):
        compare(Bounded(jnp.ones((1, 2)), jnp.float32(0.5), E5M2), np.ones(2, bool))
