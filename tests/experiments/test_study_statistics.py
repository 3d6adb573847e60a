"""The statistics that studies share, on runs whose true effects and noise are known."""

import numpy as np
import pytest

from experiments.study.statistics import (
    Effect,
    compare,
    cost_of,
    gap,
    holm,
    seeds_for,
)

STEPS, NOISE = 200, 5e-4


def synthetic(effects: dict[str, float], *, seeds: int, random: np.random.Generator) -> list[dict]:
    """Runs whose log loss is that of their seed, the arm's effect, and the luck of the run."""
    rows = []
    for seed in range(seeds):
        of_batches = 1.0 + 0.05 * random.standard_normal(STEPS) + 0.1 * random.standard_normal()
        for arm, effect in effects.items():
            luck = NOISE * random.standard_normal()
            losses = np.exp(of_batches + effect + luck + 1e-3 * random.standard_normal(STEPS))
            held_out = [float(np.exp(1.2 + effect + luck))] * 4
            rows.append({
                "arm": arm, "seed": seed, "losses": losses.tolist(),
                "held_out": dict.fromkeys(("own", "bf16", "coat"), held_out),
            })  # fmt: skip
    return rows


EFFECTS = {"base": 0.0, "ulp": 0.0, "coat": 3e-3, "harmless": 0.0}


def test_intervals_hold_the_true_effect_at_least_as_often_as_they_say():
    random = np.random.default_rng(0)
    held, trials = 0, 300
    for _ in range(trials):
        rows = synthetic(EFFECTS, seeds=3, random=random)
        found = compare(rows, ["base", "ulp"]).effects
        held += sum(abs(found[arm].mean - EFFECTS[arm]) <= found[arm].half for arm in found)
    # 600 intervals of 95 %, two in a trial not independent: at most 5 standard deviations off. Most
    # come from the spread of three seeds, and some are as wide as the noise floor.
    assert 0.90 <= held / (2 * trials) < 1


def test_seeds_that_agree_by_chance_do_not_make_an_interval_narrower_than_the_noise():
    rows = synthetic(EFFECTS, seeds=3, random=np.random.default_rng(9))
    base = {row["seed"]: row for row in rows if row["arm"] == "base"}
    ulp = {row["seed"]: row for row in rows if row["arm"] == "ulp"}
    for row in rows:
        if row["arm"] == "coat":  # always as far above the mean of its baselines
            pair = np.log([base[row["seed"]]["losses"], ulp[row["seed"]]["losses"]])
            row["losses"] = np.exp(np.mean(pair, axis=0) + 2e-4).tolist()
    result = compare(rows, ["base", "ulp"])
    found = result.effects["coat"]
    assert found.half == result.noise.band(3, 2)
    assert found.half > 2e-4
    assert found.p > 0.05


def test_an_effect_six_times_the_noise_is_found_and_none_where_there_is_none():
    rows = synthetic(EFFECTS, seeds=5, random=np.random.default_rng(1))
    result = compare(rows, ["base", "ulp"])
    assert result.effects["coat"].holm < 0.01
    assert result.effects["harmless"].holm > 0.05
    assert result.effects["coat"].seeds == 5
    assert result.baselines == 2
    assert result.noise.floor_freedom == 5
    assert abs(result.effects["coat"].mean) > result.noise.band(5, 2)


@pytest.mark.parametrize("seeds", [2, 3, 8])
def test_a_narrower_interval_takes_more_seeds(seeds: int):
    effect = Effect(mean=0.0, half=0.01, p=1.0, holm=1.0, seeds=seeds)
    assert seeds_for(0.0101, effect) == seeds
    assert seeds_for(0.0099, effect) == seeds + 1


def test_runs_that_are_missing_and_seeds_without_baseline_are_no_obstacle():
    rows = synthetic(EFFECTS, seeds=4, random=np.random.default_rng(3))
    whole = compare(rows, ["base", "ulp"]).effects["coat"]
    rows = [row for row in rows if (row["arm"], row["seed"]) not in {("coat", 1), ("ulp", 2)}]
    rows = [row for row in rows if row["seed"] != 3 or row["arm"] not in {"base", "ulp"}]
    part = compare(rows, ["base", "ulp"]).effects["coat"]
    assert part.seeds == 2
    assert part.mean == pytest.approx(whole.mean, abs=4 * NOISE)


def test_one_run_against_one_baseline_has_no_interval():
    rows = synthetic({"base": 0.0, "coat": 1e-3}, seeds=1, random=np.random.default_rng(4))
    result = compare(rows, ["base"])
    effect = result.effects["coat"]
    assert np.isnan([effect.half, effect.p, effect.holm]).all()
    assert np.isnan(result.noise.band(1, 1))


def test_holm_corrects_the_smallest_most_and_keeps_the_order():
    # The example of Holm's procedure: 0.01 * 4, 0.02 * 3, max(0.03 * 2, before), max(0.04, before).
    corrected = holm([0.03, 0.01, 0.04, 0.02])
    assert corrected == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.6, float("nan"), 0.9])[0] == 1.0


def test_gap_of_an_arm_is_its_effect_and_of_a_baseline_about_nothing():
    rows = synthetic(EFFECTS, seeds=3, random=np.random.default_rng(6))
    coat = gap(rows, "coat", ["base", "ulp"])
    assert coat.shape == (STEPS,)
    assert coat.mean() == pytest.approx(3e-3, abs=4 * NOISE)
    assert abs(gap(rows, "ulp", ["base", "ulp"]).mean()) < 4 * NOISE


def test_runs_are_compared_with_those_of_the_same_network():
    """Networks of one seed lie far apart; what was done to each of them is found all the same."""
    random = np.random.default_rng(3)
    rows = []
    for network in ("a", "b"):
        rows += [row | {"network": network} for row in synthetic(EFFECTS, seeds=3, random=random)]
    result = compare(rows, ["base", "ulp"])
    assert result.effects["coat"].seeds == 3
    assert abs(result.effects["coat"].mean - EFFECTS["coat"]) < 2 * NOISE
    assert result.noise.floor < 2 * NOISE
    assert result.noise.floor_freedom == 6  # of two baselines of six networks


def test_a_cost_is_the_mean_with_student_s_interval():
    from scipy import stats  # here, because it takes each worker a second

    gaps = [0.010, 0.012, 0.017]
    mean, half = cost_of(gaps)
    found = stats.ttest_1samp(gaps, 0).confidence_interval(0.95)
    assert (mean - half, mean + half) == pytest.approx((found.low, found.high))
    rows = [
        {"arm": arm, "seed": seed, "losses": [np.exp(loss)]}
        for seed, gap in enumerate(gaps)
        for arm, loss in (("base", 1.0 + seed), ("coat", 1.0 + seed + gap))
    ]
    effect = compare(rows, ["base"]).effects["coat"]
    assert (effect.mean, effect.half) == pytest.approx((mean, half))
    assert effect.p == pytest.approx(stats.ttest_1samp(gaps, 0).pvalue)
    assert str(effect) == "+1.300 % ± 0.896"
    assert np.isnan(cost_of([0.1]).half)
