"""One global norm for optimizers and trainer, in FP32 whatever the gradients' dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from coat_jax.optax import global_norm, global_norm_scale
from coat_jax.training import step


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_the_norm_is_that_of_the_gradients_in_float64(dtype):
    """BF16 sums stop growing after some hundred equal terms; FP32 sums are right to 1e-6."""
    rng = np.random.default_rng(0)
    grads = {
        "large": jnp.asarray(rng.standard_normal((512, 512)), dtype),
        "small": jnp.asarray(rng.standard_normal(3), dtype),
        "none": None,
    }
    exact = np.sqrt(sum(np.sum(np.float64(g) ** 2) for g in jax.tree.leaves(grads)))
    for norm in (global_norm(grads), jax.jit(global_norm)(grads)):
        assert norm.dtype == jnp.float32
        np.testing.assert_allclose(norm, exact, rtol=1e-5)
    for largest in (1.0, 0.5 * exact, 2 * exact):
        scale = global_norm_scale(grads, largest)
        np.testing.assert_allclose(scale, min(1.0, largest / exact), rtol=1e-5)
    if dtype == jnp.bfloat16:  # What this test would miss if optax's norm passed it.
        assert abs(float(optax.tree.norm(grads)) / exact - 1) > 1e-3


def test_a_complex_gradient_counts_by_its_magnitude():
    assert float(global_norm({"a": jnp.array([3 + 4j]), "b": jnp.array([12.0])})) == 13.0


def test_the_trainer_has_no_norm_of_its_own():
    assert step.global_norm is global_norm


def test_a_largest_norm_is_above_zero_and_finite():
    for largest in (0, 1e-31, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"max_norm=.* its range, 1e-30 <= max_norm < inf"):
            global_norm_scale({"a": jnp.ones(3)}, largest)


def test_norms_of_zero_and_schedules_that_reach_zero_scale_by_no_nan():
    """The numbers of a schedule are not known when a step is traced."""
    assert float(global_norm({})) == 0.0
    assert float(global_norm_scale({"a": jnp.zeros((4, 128))}, 1.0)) == 1.0
    scale = jax.jit(global_norm_scale)
    for grads, expected in ((jnp.ones(4), 0.0), (jnp.zeros(4), 1.0)):
        assert float(scale({"a": grads}, 0.0)) == expected
    assert float(scale({"a": jnp.ones(4)}, jnp.inf)) == 1.0
    assert np.isnan(scale({"a": jnp.array([jnp.nan])}, 1.0))
