"""What counts as diverged and stuck, on curves whose story is known."""

import numpy as np
import pytest

from experiments.stability.events import (
    entropy,
    events_of,
    final_loss,
    running_median,
)

CEILING, FIRST, LOW, STEPS = 3.2, 5.5, 2.0, 300


def learning(*, noise: float = 0.05, seed: int = 0, low: float = LOW) -> np.ndarray:
    """A loss that falls from FIRST to `low`."""
    curve = low + (FIRST - low) * np.exp(-np.arange(STEPS) / 25)
    return curve + noise * np.random.default_rng(seed).standard_normal(STEPS)


def test_a_run_that_learns_is_trained():
    for seed in range(50):
        found = events_of(learning(seed=seed), CEILING)
        assert found.outcome == "trained"
        assert found.final == pytest.approx(LOW, abs=0.1)


def test_the_onset_of_a_jump_that_lasts_is_its_first_step():
    for step in (60, 150, 240):
        losses = learning()
        losses[step:] += 3.0
        found = events_of(losses, CEILING)
        assert found.outcome == "diverged"
        assert found.onset == step


def test_losses_that_are_not_finite_are_divergence():
    for bad in (np.nan, np.inf):
        losses = learning()
        losses[120:] = bad
        found = events_of(losses, CEILING)
        assert (found.outcome, found.onset) == ("diverged", 120)
        assert found.final == np.inf


def test_a_slow_rise_is_divergence():
    losses = learning(noise=0.02)
    losses[100:] += 3 * np.linspace(0, 1, 200)
    found = events_of(losses, CEILING)
    assert found.outcome == "diverged"
    # It has lost half of what it learnt when it is 0.6 nats up, plus what it still learnt then.
    assert 130 <= found.onset <= 160


def test_a_rise_that_comes_back_is_no_divergence():
    losses = learning()
    losses[150:170] += 2.0
    found = events_of(losses, CEILING)
    assert (found.outcome, found.onset) == ("trained", None)


def test_a_run_that_ends_worse_than_its_best_but_not_by_half_is_trained():
    losses = learning()
    losses[200:] += 0.4 * (CEILING - LOW)
    assert events_of(losses, CEILING).outcome == "trained"
    losses[200:] += 0.2 * (CEILING - LOW)
    assert events_of(losses, CEILING).outcome == "diverged"


def test_a_run_that_never_beats_byte_frequencies_is_stuck():
    for losses in (learning(low=CEILING), np.full(STEPS, np.nan), learning(low=4.0)):
        found = events_of(losses, CEILING)
        assert (found.outcome, found.onset) == ("stuck", None)


def test_noise_alone_is_no_divergence():
    """Batches of a hundred bytes: the loss of a step is as uncertain as all that was learnt."""
    for seed in range(200):
        assert events_of(learning(noise=0.4, seed=seed)[:100], CEILING).outcome == "trained"
        hardly = events_of(learning(noise=0.4, seed=seed, low=2.6)[:100], CEILING)
        assert hardly.outcome != "diverged"
    for seed in range(200):
        assert events_of(learning(noise=0.4, seed=seed, low=3.3), CEILING).outcome == "stuck"


def test_one_lucky_or_unlucky_step_decides_nothing():
    losses = learning(low=CEILING)
    losses[100] = 1.0
    assert events_of(losses, CEILING).outcome == "stuck"
    losses = learning()
    losses[-1] = np.nan
    assert events_of(losses, CEILING).outcome == "trained"


@pytest.mark.parametrize("width", [1, 4, 5, 15])
def test_a_running_median_is_that_of_the_steps_around(width):
    values = np.random.default_rng(0).standard_normal(40)
    half = width // 2
    expected = [np.median(values[max(0, i - half) : i + half + 1]) for i in range(40)]
    np.testing.assert_allclose(running_median(values, width), expected)


def test_the_final_loss_is_the_median_of_the_last_tenth():
    losses = np.arange(100.0)
    assert final_loss(losses) == 94.5
    losses[91:] = np.nan
    assert final_loss(losses) == np.inf


def test_entropy_is_that_of_the_bytes():
    assert entropy(np.repeat(np.uint8([1, 2]), 8)) == pytest.approx(np.log(2))
    assert entropy(np.arange(256, dtype=np.uint8)) == pytest.approx(np.log(256))
    p = np.array([3 / 4, 1 / 4])
    assert entropy(np.uint8([7, 7, 7, 9])) == pytest.approx(-np.sum(p * np.log(p)))
