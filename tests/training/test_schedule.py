"""The learning rate rises to its peak and falls as its name says."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from coat_jax.training.config import OptimizerConfig
from coat_jax.training.schedule import learning_rate

STEPS, PEAK = 100, 2e-3
NAMES = ("cosine", "linear", "wsd", "constant")


def rates(steps=STEPS, **changes):
    defaults = {"learning_rate": PEAK, "warmup_steps": 0.1, "final_ratio": 0.1}
    config = OptimizerConfig(**defaults | changes)
    return np.asarray(jax.vmap(lambda n: learning_rate(config, steps, n))(jnp.arange(steps)))


@pytest.mark.parametrize("name", NAMES)
def test_it_rises_in_a_straight_line_to_the_peak_and_never_again(name):
    got = rates(schedule=name)
    np.testing.assert_allclose(got[:10], PEAK * np.arange(1, 11) / 10, rtol=1e-6)
    np.testing.assert_allclose(got[10], PEAK, rtol=1e-6)
    assert np.all(np.diff(got[10:]) <= 0)


def test_the_number_of_an_update_may_be_pythons():
    config = OptimizerConfig(warmup_steps=10)
    assert float(learning_rate(config, STEPS, 4)) == float(
        learning_rate(config, STEPS, jnp.int32(4))
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_whole_number_counts_steps_and_another_is_a_share(name):
    np.testing.assert_array_equal(
        rates(schedule=name, warmup_steps=10), rates(schedule=name, warmup_steps=0.1)
    )
    assert rates(schedule=name, warmup_steps=1)[0] == rates(schedule=name, warmup_steps=0)[0]
    first = rates(schedule=name, warmup_steps=1.0)[0]
    np.testing.assert_allclose(first, PEAK / STEPS, rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_one_step_after_the_last_it_would_be_at_its_end(name):
    config = OptimizerConfig(learning_rate=PEAK, schedule=name, final_ratio=0.1)
    end = PEAK if name == "constant" else PEAK / 10
    np.testing.assert_allclose(learning_rate(config, STEPS, jnp.int32(STEPS)), end, rtol=1e-5)


def test_the_cosine_is_that_of_optax():
    theirs = optax.cosine_decay_schedule(PEAK, STEPS - 10, alpha=0.1)
    wanted = [theirs(n) for n in range(STEPS - 10)]
    np.testing.assert_allclose(rates(schedule="cosine")[10:], wanted, rtol=1e-5)


@pytest.mark.parametrize("decay_steps", [0.3, 30])
def test_wsd_stays_until_its_decay(decay_steps):
    got = rates(schedule="wsd", decay_steps=decay_steps)
    np.testing.assert_allclose(got[10:71], PEAK, rtol=1e-6)
    np.testing.assert_allclose(np.diff(got[71:]), -0.9 * PEAK / 30, rtol=1e-3)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_shortest_runs_have_rates_too(name, steps):
    for warmup in (0.0, 0.5, 0.8):
        got = rates(steps, schedule=name, warmup_steps=warmup)
        assert np.all((got > 0) & (got <= PEAK * (1 + 1e-6)))
