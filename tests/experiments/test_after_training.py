"""The study of networks that are quantized after training: what it computes, and one run of it."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from coat_jax.errors import UserError
from experiments.after_training import changes, quantizing, recipes
from experiments.after_training.changes import What
from experiments.after_training.study import DONE, EARLIER, STUDY, TODAY
from experiments.loss_study import arms
from experiments.row_files import Row, digest
from experiments.study.study import Stopped

NAMES = ("int8 mse static", "fp8 mse none")
STATIC = What(NAMES[0])
# Relative costs of quantization, in each seed; those of FP8 are the same for all arms.
COSTS = {"bf16": (0.010, 0.012, 0.014), "coat": (0.005, 0.007, 0.006)}


@pytest.fixture
def rows(call_of) -> list[Row]:
    call = call_of(STUDY, "--size", "tiny")

    def row(arm: str, seed: int) -> Row:
        (named,) = STUDY.rows_of(call, arm, [seed], "a text")
        loss = 2.0 + 0.1 * seed
        in_int8, in_fp8 = loss * math.exp(COSTS[arm][seed]), loss * math.exp(0.001)
        after = {name: [loss] for name in ("bf16", *NAMES)}
        return named | {
            "held_out": {"own": [loss], "bf16": [loss - 0.5, loss + 0.5]},
            "quantized": dict(zip(NAMES, ([in_int8], [in_fp8]), strict=True)),
            "further": {
                "bf16": after | {"bf16": [0.9 * loss]},
                "int8": after | {NAMES[0]: [0.9 * loss * math.exp(0.002)]},
            },
            "parents": {"date": "2026-01-01"},
        }

    return [row(arm, seed) for arm in COSTS for seed in range(3)]


def test_a_cost_is_that_of_the_same_parameters_in_bf16(rows):
    from scipy import stats  # here, because it takes each worker a second

    found = changes.costs(rows)
    assert found["coat"][What("fp8 mse none")] == pytest.approx((0.001, 0), abs=1e-9)
    for arm, costs in COSTS.items():
        interval = stats.ttest_1samp(costs, 0).confidence_interval(0.95)
        mean, half = found[arm][STATIC]
        assert (mean - half, mean + half) == pytest.approx((interval.low, interval.high))


def test_an_excess_is_paired_with_the_baseline_of_its_seed(rows):
    from scipy import stats  # here, because it takes each worker a second

    pairs = np.subtract(COSTS["coat"], COSTS["bf16"])
    effect = changes.excesses(rows, STATIC)["coat"]
    assert effect.mean == pytest.approx(-0.006)
    assert effect.p == pytest.approx(stats.ttest_1samp(pairs, 0).pvalue)
    without = [row for row in rows if row["arm"] == "coat" or row["seed"] == 0]
    assert changes.excesses(without, STATIC)["coat"].seeds == 1
    assert changes.excesses([row for row in rows if row["arm"] == "coat"], STATIC) == {}


def test_further_training_is_compared_with_as_many_steps_in_bf16(rows):
    found = changes.costs(rows)["bf16"]
    assert found[What("int8 mse static", "int8")].mean == pytest.approx(0.002)
    assert found[What("bf16", "int8")].mean == pytest.approx(-math.log(0.9))
    assert What("bf16", "bf16") not in found


def test_tables_show_every_arm_also_one_seed_alone(rows, capsys):
    STUDY.show(rows, None)
    printed = capsys.readouterr().out
    for words in ("+1.200 % ± 0.497", "int8 mse static, after steps in int8", "-0.600 % ± 0.430"):
        assert words in printed
    STUDY.show([row for row in rows if (row["arm"], row["seed"]) == ("coat", 0)], None)
    assert "+0.500 % ± ?" in capsys.readouterr().out


def test_what_is_done_after_training_decides_a_result(rows, call_of, monkeypatch):
    assert digest(recipes.described()) == TODAY
    older = rows[0] | {"definition": rows[0]["definition"] | {DONE: EARLIER[0]}}
    assert STUDY.of_today(older) == rows[0]
    monkeypatch.setattr(recipes, "FURTHER_STEPS", 41)
    (other,) = STUDY.rows_of(call_of(STUDY, "--size", "tiny"), "bf16", [0], "a text")
    assert other["key"] != rows[0]["key"]
    for name, recipe in recipes.RECIPES.items():
        assert name.split() == [recipe.format, recipe.fit, recipe.activations]


@pytest.mark.usefixtures("small")
def test_a_run_that_was_stopped_goes_on_where_it_was(
    job_of, after, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    some = ("int8 mse static", "int8 max dynamic", "fp8 percentile none")
    monkeypatch.setattr(quantizing, "RECIPES", {name: recipes.RECIPES[name] for name in some})
    monkeypatch.setattr(quantizing, "AFTER_FURTHER", some[:1])
    monkeypatch.setattr(quantizing, "FURTHER", {"int8": recipes.FURTHER["int8"]})
    monkeypatch.setattr(recipes, "FURTHER_STEPS", 2)
    monkeypatch.setattr(recipes, "CALIBRATION", 4)
    with pytest.raises(Stopped):  # after four steps and three measurements
        quantizing.measure(job_of(STUDY, "products", asked=after(4 + 3)))
    measured = json.loads((tmp_path / "run" / "measured.json").read_text())
    assert list(measured) == ["held out", "int8 mse static", "int8 max dynamic"]
    (whole,) = quantizing.measure(job_of(STUDY, "products"))
    assert whole["held_out"] == measured["held out"]
    assert list(whole["quantized"]) == list(some)
    assert list(whole["further"]["int8"]) == ["bf16", "int8 mse static"]
    in_bf16 = np.mean(whole["held_out"]["bf16"])
    # Two steps at a tenth of the learning rate change the network a little, as codes do.
    for losses in (*whole["quantized"].values(), whole["further"]["int8"]["bf16"]):
        assert np.mean(losses) != in_bf16
        assert np.mean(losses) == pytest.approx(in_bf16, rel=0.01)


def test_a_text_that_is_too_short_is_refused_before_training(small, job_of, monkeypatch):
    longer = dataclasses.replace(small.settings, steps=200_000)
    monkeypatch.setitem(arms.SIZES, "small", dataclasses.replace(small, settings=longer))
    monkeypatch.setattr(quantizing, "train", pytest.fail)
    with pytest.raises(UserError, match="No run reads any of it twice"):
        quantizing.measure(job_of(STUDY, "bf16"))
