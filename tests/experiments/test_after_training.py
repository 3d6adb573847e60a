"""The study of networks that are quantized after training: what it computes, and one run of it."""

import dataclasses
import functools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from tiny_study import After, job

from coat_jax.errors import UserError
from experiments.after_training import changes, recipes, run, show
from experiments.after_training.changes import What
from experiments.loss_study import arms, results
from experiments.loss_study.arm import Size

SEEDS = (0, 1, 2)
NAMES = ("int8 mse static", "fp8 mse none")
# Relative costs of quantization, in each seed; those of FP8 are the same for all arms.
COSTS = {"bf16": (0.010, 0.012, 0.014), "coat": (0.005, 0.007, 0.006)}


def row(arm: str, seed: int) -> dict:
    size = arms.SIZES["tiny"]
    made = run.row_of(arm, arms.ARMS[arm], "tiny", size, seed, size.settings, "a text")
    loss = 2.0 + 0.1 * seed
    in_int8, in_fp8 = loss * math.exp(COSTS[arm][seed]), loss * math.exp(0.001)
    after = {name: [loss] for name in ("bf16", *NAMES)}
    return made | {
        "losses": [loss] * 20,
        "held_out": {"own": [loss], "bf16": [loss - 0.5, loss + 0.5]},
        "quantized": dict(zip(NAMES, ([in_int8], [in_fp8]), strict=True)),
        "further": {
            "bf16": after | {"bf16": [0.9 * loss]},
            "int8": after | {NAMES[0]: [0.9 * loss * math.exp(0.002)]},
        },
        "parents": {"date": "2026-01-01"},
    }


@functools.cache
def rows() -> list[dict]:
    return [row(arm, seed) for arm in COSTS for seed in SEEDS]


def test_a_cost_is_that_of_the_same_parameters_in_bf16():
    found = changes.costs(rows())
    assert found["bf16"][What("int8 mse static")].mean == pytest.approx(0.012)
    assert found["coat"][What("int8 mse static")].mean == pytest.approx(0.006)
    in_fp8 = found["coat"][What("fp8 mse none")]
    assert in_fp8.mean == pytest.approx(0.001)
    assert in_fp8.half == pytest.approx(0, abs=1e-9)
    assert in_fp8.seeds == 3
    # Student's t of 2 degrees of freedom, over three numbers 0.002 apart.
    half = 4.302653 * 0.002 / math.sqrt(3)
    assert found["bf16"][What("int8 mse static")].half == pytest.approx(half)


def test_an_excess_is_paired_with_the_baseline_of_its_seed():
    (found,) = changes.excesses(rows()).values()
    excess = found[What("int8 mse static")]
    assert excess.mean == pytest.approx(-0.006)
    spread = np.std([-0.005, -0.005, -0.008], ddof=1)
    assert excess.half == pytest.approx(4.302653 * spread / math.sqrt(3))
    assert found[What("fp8 mse none")].mean == pytest.approx(0, abs=1e-9)


def test_seeds_without_a_baseline_have_no_excess():
    without = [one for one in rows() if one["arm"] == "coat" or one["seed"] == 0]
    assert changes.excesses(without)["coat"][What("int8 mse static")].seeds == 1
    assert changes.excesses([one for one in rows() if one["arm"] == "coat"]) == {}


def test_further_training_is_compared_with_as_many_steps_in_bf16():
    found = changes.costs(rows())["bf16"]
    assert found[What("int8 mse static", "int8")].mean == pytest.approx(0.002)
    assert found[What("int8 mse static", "bf16")].mean == pytest.approx(-math.log(0.9))
    assert found[What("bf16", "int8")].mean == pytest.approx(-math.log(0.9))
    assert What("bf16", "bf16") not in found


def test_settings_after_training_are_part_of_a_result_s_key(monkeypatch: pytest.MonkeyPatch):
    def key() -> str:
        return row("coat", 0)["key"]

    size = arms.SIZES["tiny"]
    of_study = results.row_of("coat", arms.ARMS["coat"], "tiny", size, 0, size.settings, "a text")
    before = key()
    assert before != of_study["key"]
    monkeypatch.setattr(recipes, "FURTHER_STEPS", 41)
    assert key() != before


def test_every_recipe_is_another_one():
    assert len({str(recipe) for recipe in recipes.RECIPES.values()}) == 18
    assert set(recipes.AFTER_FURTHER) < set(recipes.RECIPES)
    for name, recipe in recipes.RECIPES.items():
        assert name.split() == [recipe.format, recipe.fit, recipe.activations]


def test_tables_and_picture_show_every_arm(capsys: pytest.CaptureFixture, tmp_path: Path):
    pytest.importorskip("matplotlib")
    show.show(rows(), tmp_path)
    printed = capsys.readouterr().out
    for words in (
        "coat (3)",
        "+1.200 % ± 0.497",
        "-0.600 %",
        "int8 mse static, after steps in int8",
    ):
        assert words in printed
    assert len(list(tmp_path.glob("after_training_tiny_*.png"))) == 1


def test_one_seed_and_no_baseline_are_shown_too(capsys: pytest.CaptureFixture, tmp_path: Path):
    pytest.importorskip("matplotlib")
    show.show([one for one in rows() if one["arm"] == "coat" and one["seed"] == 0], tmp_path)
    assert "+0.500 % ± ?" in capsys.readouterr().out
    show.show([], tmp_path)
    assert "no results yet" in capsys.readouterr().out


# --- Running ---------------------------------------------------------------------------------


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some recipes, and two steps of further training in INT8."""
    some = ("int8 mse static", "int8 max dynamic", "fp8 percentile none")
    monkeypatch.setattr(run, "RECIPES", {name: recipes.RECIPES[name] for name in some})
    monkeypatch.setattr(run, "AFTER_FURTHER", some[:1])
    monkeypatch.setattr(run, "FURTHER", {"int8": recipes.FURTHER["int8"]})
    monkeypatch.setattr(recipes, "FURTHER_STEPS", 2)
    monkeypatch.setattr(recipes, "CALIBRATION", 4)


@pytest.mark.usefixtures("few")
def test_a_run_that_was_stopped_goes_on_where_it_was(
    small: Size, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    one = job(small, "products", corpus, tmp_path / "run")
    assert run.run(one, After(2)) is None  # while it trains
    assert run.run(one, After(2 + 3)) is None  # after two more steps and three measurements
    measured = json.loads((tmp_path / "run" / "measured.json").read_text())
    assert list(measured) == ["held out", "int8 mse static", "int8 max dynamic"]
    with monkeypatch.context() as without:
        without.setattr(run._After, "quantized", None)  # only what is missing is measured
        with pytest.raises(TypeError):
            run.run(one, [])

    whole = run.run(one, [])
    assert whole is not None
    assert whole["held_out"] == measured["held out"]
    assert set(whole["quantized"]) == {"int8 mse static", "int8 max dynamic", "fp8 percentile none"}
    assert set(whole["further"]["int8"]) == {"bf16", "int8 mse static"}
    in_bf16 = np.mean(whole["held_out"]["bf16"])
    for losses in whole["quantized"].values():
        assert np.mean(losses) != in_bf16
        assert np.mean(losses) == pytest.approx(in_bf16, rel=0.01)
    # Two steps at a tenth of the learning rate change the network, a little.
    assert np.mean(whole["further"]["int8"]["bf16"]) != in_bf16
    assert np.mean(whole["further"]["int8"]["bf16"]) == pytest.approx(in_bf16, rel=0.01)


@pytest.mark.usefixtures("few")
def test_a_text_that_is_too_short_is_refused_before_training(
    small: Size, corpus: Path, tmp_path: Path
):
    longer = dataclasses.replace(small.settings, steps=200_000)
    one = job(dataclasses.replace(small, settings=longer), "bf16", corpus, tmp_path / "run")
    with pytest.raises(UserError, match="No run reads any of it twice"):
        run.run(one, [])
