"""How often runs fail, against closed forms and brute force."""

import math
from fractions import Fraction

import pytest

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


def test_tangos_interval_holds_at_the_ends():
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
