"""The learning rate rises to its peak and falls as its name says."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from coat_jax.training.config import OptimizerConfig
from coat_jax.training.optimizer import learning_rate

STEPS, PEAK = 100, 2e-3
NAMES = ("cosine", "linear", "wsd", "constant")


def rates(steps=STEPS, also=0, **changes):
    """Of all steps, and of `also` after the last."""
    defaults = {"learning_rate": PEAK, "warmup_steps": 0.1, "final_ratio": 0.1}
    config = OptimizerConfig(**defaults | changes)
    return np.asarray(jax.vmap(lambda n: learning_rate(config, steps, n))(jnp.arange(steps + also)))


@pytest.mark.parametrize("name", NAMES)
def test_it_rises_in_a_straight_line_to_the_peak_and_never_again(name):
    """One step after the last it would be at its end."""
    got = rates(schedule=name, also=1)
    np.testing.assert_allclose(got[:10], PEAK * np.arange(1, 11) / 10, rtol=1e-6)
    np.testing.assert_allclose(got[10], PEAK, rtol=1e-6)
    assert np.all(np.diff(got[10:]) <= 0)
    np.testing.assert_allclose(got[-1], PEAK if name == "constant" else PEAK / 10, rtol=1e-5)


def test_a_whole_number_counts_steps_and_another_is_a_share():
    np.testing.assert_array_equal(rates(warmup_steps=10), rates(warmup_steps=0.1))
    assert rates(warmup_steps=1)[0] == rates(warmup_steps=0)[0]
    np.testing.assert_allclose(rates(warmup_steps=1.0)[0], PEAK / STEPS, rtol=1e-6)
    assert float(learning_rate(OptimizerConfig(warmup_steps=10), STEPS, 4)) == np.float32(1.5e-4)


def test_the_cosine_is_that_of_optax():
    theirs = optax.cosine_decay_schedule(PEAK, STEPS - 10, alpha=0.1)
    wanted = [theirs(n) for n in range(STEPS - 10)]
    np.testing.assert_allclose(rates(schedule="cosine")[10:], wanted, rtol=1e-5)


def test_the_others_fall_in_a_straight_line_wsd_not_before_its_decay():
    np.testing.assert_allclose(np.diff(rates(schedule="linear")[10:]), -0.9 * PEAK / 90, rtol=1e-3)
    for decay_steps in (0.3, 30):
        got = rates(schedule="wsd", decay_steps=decay_steps)
        np.testing.assert_allclose(got[10:71], PEAK, rtol=1e-6)
        np.testing.assert_allclose(np.diff(got[71:]), -0.9 * PEAK / 30, rtol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_the_shortest_runs_have_rates_too(name):
    for steps, warmup in itertools.product((1, 2, 3), (0.0, 0.5, 0.8)):
        got = rates(steps, schedule=name, warmup_steps=warmup)
        assert np.all((got > 0) & (got <= PEAK * (1 + 1e-6)))
