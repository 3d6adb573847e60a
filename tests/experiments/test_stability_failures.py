"""How often runs fail, against closed forms and brute force; and whether alarms announce it."""

import math
from fractions import Fraction

import numpy as np
import pytest

from experiments.stability.alarms import FALSE_ALARMS, PAST, lead, rises
from experiments.stability.failures import mcnemar, paired, tango, wilson

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
