"""The statistics of the stability study, against closed forms and brute force."""

import math
from fractions import Fraction

import numpy as np
import pytest

from experiments.stability.prediction import (
    FALSE_ALARMS,
    PAST,
    Area,
    above,
    area,
    lead,
    pooled,
    rises,
)
from experiments.stability.statistics import band, mcnemar, paired, sensitivity, tango, wilson

# --- Rates -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "runs", "low", "high"),
    # Newcombe (1998), table I, method 3.
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_has_the_published_intervals(count, runs, low, high):
    found = wilson(count, runs)
    assert (found.low, found.high) == pytest.approx((low, high), abs=5e-5)


def test_the_ends_of_wilsons_interval_are_where_the_score_test_just_rejects():
    z = 1.959963984540054
    for count, runs in ((3, 64), (10, 64), (63, 64), (200, 384)):
        found = wilson(count, runs)
        for p in (found.low, found.high):
            assert abs(count / runs - p) == pytest.approx(z * math.sqrt(p * (1 - p) / runs))


def test_wilsons_interval_is_the_mirror_image_for_the_others():
    one, other = wilson(5, 64), wilson(59, 64)
    assert (one.low, one.high) == pytest.approx((1 - other.high, 1 - other.low))
    assert wilson(0, 64).low == 0.0
    assert wilson(64, 64).high == 1.0


# --- Differences -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("only_one", "only_other", "pairs", "low", "high", "p"),
    # Cavo et al. (2012), as the R package contingencytables has it, and Bentur et al. (2009), as
    # ratesci has it.
    [(6, 16, 161, -0.1240, -0.0054, 0.052479), (1, 7, 21, -0.517, -0.026, 0.0703)],
)
def test_differences_of_pairs_are_the_published_ones(only_one, only_other, pairs, low, high, p):
    digits = 5e-4 if pairs == 21 else 5e-5
    assert tango(only_one, only_other, pairs) == pytest.approx((low, high), abs=digits)
    assert mcnemar(only_one, only_other) == pytest.approx(p, abs=digits)


def test_mcnemar_is_exact():
    """By enumeration: each pair in which one of two fails is a fair coin."""
    for differ in range(1, 13):
        ways = [math.comb(differ, k) for k in range(differ + 1)]
        for only_one, way in enumerate(ways):
            as_rare = sum(other for other in ways if other <= way)
            expected = float(Fraction(as_rare, 2**differ))
            assert mcnemar(only_one, differ - only_one) == pytest.approx(expected, rel=1e-9)
    assert mcnemar(0, 0) == 1.0


def most_likely(only_one, only_other, pairs, d):
    """The share of pairs in which only the other fails, if the difference is d: by a search."""
    q = np.linspace(max(0.0, -d), (1 - d) / 2, 400_001)[1:-1]
    rest = pairs - only_one - only_other
    logs = [only_one * np.log(q + d), only_other * np.log(q), rest * np.log(1 - 2 * q - d)]
    return q[np.argmax(sum(logs))]


@pytest.mark.parametrize("counts", [(14, 6, 384), (14, 5, 64), (3, 0, 20), (24, 32, 192)])
def test_the_ends_of_tangos_interval_are_where_the_score_test_just_rejects(counts):
    only_one, only_other, pairs = counts
    for d in tango(*counts):
        variance = (2 * most_likely(*counts, d) + d * (1 - d)) / pairs
        score = abs((only_one - only_other) / pairs - d) / math.sqrt(variance)
        assert score == pytest.approx(1.959963984540054, rel=1e-4)


def test_tangos_interval_covers_the_difference_as_often_as_it_should():
    """The exact share of all outcomes of 30 pairs whose interval has the true difference."""
    pairs = 30
    intervals = {(b, c): tango(b, c, pairs) for b in range(pairs + 1) for c in range(pairs + 1 - b)}
    for p, q in ((0.05, 0.05), (0.2, 0.1), (0.3, 0.02)):
        covered = 0.0
        for (b, c), (low, high) in intervals.items():
            if low <= p - q <= high:
                ways = math.comb(pairs, b) * math.comb(pairs - b, c)
                covered += ways * p**b * q**c * (1 - p - q) ** (pairs - b - c)
        # A score interval is right on average over p and q, not at each of them.
        assert 0.93 < covered < 0.98


def test_tangos_interval_is_the_mirror_image_for_the_others_and_holds_at_the_ends():
    low, high = tango(14, 6, 384)
    assert tango(6, 14, 384) == pytest.approx((-high, -low))
    z2 = 1.959963984540054**2
    assert tango(0, 0, 64) == pytest.approx((-z2 / (64 + z2), z2 / (64 + z2)))
    assert tango(64, 0, 64) == pytest.approx(((64 - z2) / (64 + z2), 1.0))
    assert tango(0, 64, 64) == pytest.approx((-1.0, (z2 - 64) / (64 + z2)))


def test_pairs_are_the_runs_that_both_have():
    own = {(0.3, 0): True, (0.3, 1): True, (0.3, 2): False, (0.3, 9): True, (0.1, 0): True}
    base = {(0.3, 0): True, (0.3, 1): False, (0.3, 2): True, (0.3, 8): True}
    found = paired(own, base)
    assert found is not None
    assert found[:4] == (3, 1, 1, 1)
    assert found.difference == 0.0
    assert paired(own, {(0.01, 0): True}) is None


@pytest.mark.parametrize("bad", [(-1, 4), (5, 4), (0, 0)])
def test_counts_that_are_no_share_are_refused(bad):
    with pytest.raises(ValueError, match="no share"):
        wilson(*bad)
    with pytest.raises(ValueError, match="no shares"):
        tango(bad[0], 0, bad[1])


# --- Losses ----------------------------------------------------------------------------------


def test_a_band_is_of_values_that_occur_infinity_included():
    assert band([1.0, 2.0, 3.0, 4.0, np.inf]) == (3.0, 1.0, np.inf)
    assert band([2.0]) == (2.0, 2.0, 2.0)
    assert band([1.0, np.inf, np.inf]) == (np.inf, 1.0, np.inf)


def test_sensitivity_is_the_mean_above_the_best_and_ends_at_the_first_loss():
    final = {1e-3: [2.0, 2.2, 2.1], 1e-2: [1.5, 1.5, np.inf], 1e-1: [np.inf] * 3}
    assert sensitivity(final, first=5.5) == pytest.approx((2.1 + 1.5 + 5.5) / 3 - 1.5)
    assert sensitivity({1e-3: [2.0], 1e-2: [2.0]}, first=5.5) == 0.0


# --- Areas -----------------------------------------------------------------------------------


def one_point(values):
    """Runs of a signal with a single point."""
    return np.asarray(values, float)[:, None]


def test_the_area_is_the_share_of_pairs_that_are_in_order():
    random = np.random.default_rng(0)
    x, y = random.integers(0, 6, 9), random.integers(0, 6, 13)
    pairs = above(one_point(x), [0] * len(x), one_point(y), 0)
    share = np.mean([(a > b) + 0.5 * (a == b) for a in x for b in y])
    assert area(pairs).mean == pytest.approx(share)
    assert area(pairs).pairs == 9 * 13


def test_areas_are_one_zero_and_a_half_where_they_should_be():
    low, high = one_point([1, 2, 3]), one_point([4, 5, 6])
    assert area(above(high, [0] * 3, low, 0))[:2] == (1.0, 0.0)
    assert area(above(low, [0] * 3, high, 0))[:2] == (0.0, 0.0)
    assert area(above(np.ones((3, 1)), [0] * 3, np.ones((4, 1)), 0)).mean == 0.5


def test_the_area_of_two_normal_signals_is_known_and_so_is_its_error():
    """Phi(d / sqrt 2) for means d apart; the errors are those that many trials have."""
    random = np.random.default_rng(1)
    d, expected = 1.0, 0.5 * (1 + math.erf(1.0 / 2))
    found = []
    for _ in range(600):
        x, y = random.normal(d, size=40), random.normal(size=60)
        found.append(area(above(one_point(x), [0] * 40, one_point(y), 0)))
    means = np.array([one.mean for one in found])
    spread = np.std(means, ddof=1)
    assert np.mean(means) == pytest.approx(expected, abs=4 * spread / math.sqrt(600))
    # The standard deviation of 600 trials is uncertain by 3 %.
    assert np.mean([one.error for one in found]) == pytest.approx(spread, rel=0.12)


def test_runs_are_compared_at_the_same_step_so_many_points_before_divergence():
    trained = np.arange(20.0)[None] + np.array([[0.0], [0.4]])
    diverged = np.arange(20.0)[None].repeat(3, axis=0) + 0.2
    diverged[0, 5:] = 100.0
    pairs = above(diverged, [10, 10, 3], trained, before=5)
    # The third diverges too early; the first was above both at step 5, the second above one.
    assert pairs.tolist() == [[1.0, 1.0], [1.0, 0.0]]
    nan = np.full((1, 20), np.nan)
    assert above(nan, [10], trained, before=0).tolist() == [[1.0, 1.0]]
    assert above(diverged[:0], [], trained, before=0).shape == (0, 2)


def test_one_run_has_an_area_without_an_error_and_none_has_neither():
    assert area(np.array([[1.0, 0.0]])).mean == 0.5
    assert math.isnan(area(np.array([[1.0, 0.0]])).error)
    assert math.isnan(area(np.zeros((0, 5))).mean)


def test_areas_are_pooled_by_their_pairs():
    nothing = Area(math.nan, math.nan, 0)
    found = pooled([Area(0.8, 0.1, 100), nothing, Area(0.6, 0.2, 300), Area(1.0, math.nan, 5)])
    assert found.mean == pytest.approx((0.8 * 100 + 0.6 * 300) / 400)
    assert found.error == pytest.approx(math.hypot(0.1 * 100, 0.2 * 300) / 400)
    assert found.pairs == 400
    assert math.isnan(pooled([nothing]).mean)


# --- Alarms ----------------------------------------------------------------------------------


def test_a_rise_is_over_the_median_of_the_points_before():
    signal = np.full((1, 30), 2.0)
    signal[0, 20] = 6.0
    expected = np.zeros(30)
    expected[20] = np.log(3)
    np.testing.assert_allclose(rises(signal)[0], expected, atol=1e-12)
    signal[0, 20] = np.nan
    assert rises(signal)[0, 20] == np.inf
    assert np.all(rises(signal)[0, :PAST] == 0)


def test_alarms_before_a_known_rise_have_its_lead_time():
    random = np.random.default_rng(2)
    trained = np.exp(0.1 * random.standard_normal((200, 100)))
    diverged = np.exp(0.1 * random.standard_normal((40, 100)))
    diverged[:30, 68:] *= 5.0  # warns 12 points before the divergence
    found = lead(diverged, [80] * 40, trained)
    assert found.warned == pytest.approx(30 / 40, abs=0.11)
    assert found.median == 12
    assert found.false_alarms <= FALSE_ALARMS
    assert 1.2 < found.factor < 1.7


def test_as_many_false_alarms_as_allowed():
    random = np.random.default_rng(3)
    trained = np.exp(0.1 * random.standard_normal((100, 60)))
    for allowed in (0.0, 0.05, 0.2):
        assert lead(trained[:5], [50] * 5, trained, allowed).false_alarms == allowed


def test_without_runs_on_both_sides_there_is_no_lead():
    some = np.ones((3, 40))
    assert math.isnan(lead(some[:0], [], some).median)
    assert math.isnan(lead(some, [20] * 3, some[:0]).median)


def test_a_signal_that_is_shorter_than_its_past_does_not_rise():
    for length in (1, PAST - 1, PAST):
        np.testing.assert_array_equal(rises(np.ones((2, length))), np.zeros((2, length)))
