"""What is read back of runs is what they wrote."""

import math

import numpy as np
import pytest
from run_cases import write_run

from coat_jax.errors import UserError
from coat_jax.training.report import runs


@pytest.mark.parametrize(
    ("over", "x", "last"),
    [("steps", [1, 2, 3], 3), ("tokens", [64, 128, 192], 192), ("time", [0.5, 1.0, 1.5], 1.5)],
)
def test_a_curve_is_over_steps_tokens_or_time(tmp_path, over, x, last):
    """An evaluation says its step only: it stands where the record before it does."""
    (run,) = runs.load([write_run(tmp_path / "a", [3.0, 2.0, 1.0], held_out=1.5)])
    curve = run.curve("loss", over)
    np.testing.assert_array_equal(curve.x, x)
    np.testing.assert_array_equal(curve.y, [3.0, 2.0, 1.0])
    held_out = run.curve("held_out_loss", over)
    assert (held_out.x.tolist(), held_out.y.tolist()) == ([last], [1.5])


def test_final_losses_are_means_of_the_last_records(tmp_path):
    (run,) = runs.load([write_run(tmp_path / "a", [9.0, 2.0, 1.0], held_out=1.5)])
    assert (run.final_loss(2), run.final_loss(100), run.held_out_loss()) == (1.5, 4.0, 1.5)
    (run,) = runs.load([write_run(tmp_path / "b", [2.0, 1.0, None])])
    assert math.isnan(run.final_loss(2))
    assert run.held_out_loss() is None


NAN = math.nan


@pytest.mark.parametrize(
    ("y", "window", "mean"),
    [
        ([4.0, 2.0, 3.0, 1.0], 2, [4.0, 3.0, 2.5, 2.0]),
        ([4.0, 2.0, 3.0, 1.0], 9, [4.0, 3.0, 3.0, 2.5]),
        ([4.0, 2.0, 3.0, 1.0], 1, [4.0, 2.0, 3.0, 1.0]),
        ([NAN, 2.0, NAN, NAN, NAN], 2, [NAN, 2.0, 2.0, NAN, NAN]),
        ([3.0, 1e300, 3.0, 3.0, 3.0], 2, [3.0, 5e299, 5e299, 3.0, 3.0]),
    ],
)
def test_smoothing_is_the_mean_of_the_last_finite_values(y, window, mean):
    """A huge value changes only the means that contain it."""
    np.testing.assert_allclose(runs.smoothed(np.array(y), window), mean)


def test_runs_have_their_folders_names_and_more_where_these_are_alike(tmp_path):
    paths = [write_run(tmp_path / name, [1.0]) for name in ("a/x", "b/x", "c")]
    assert [run.name for run in runs.load(paths)] == ["a/x", "b/x", f"{tmp_path.name}/c"]
    assert [run.name for run in runs.load(paths[:1])] == ["x"]
    assert [run.name for run in runs.load([paths[0] / "metrics.jsonl"])] == ["x"]
    assert [run.name for run in runs.load(paths, ["1", "2", "3"])] == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no losses yet"),
        ('{"step": 1, "loss": 2', "has no losses yet"),  # torn, with nothing before it
        ('{"step": 1, "held_out_loss": 2}\n', "has no losses"),
        ('{"step": 1, "loss": 2}\n?\n', r"metrics\.jsonl:2 is not a record"),
        ('{"loss": 2}\n', r"metrics\.jsonl:1 is not a record"),
    ],
)
def test_empty_and_damaged_files_are_named(tmp_path, content, message):
    with pytest.raises(UserError, match=f"{tmp_path} has no metrics.jsonl"):
        runs.load([tmp_path])
    (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(UserError, match=message):
        runs.load([tmp_path])


def test_an_axis_that_a_run_lacks_is_named(tmp_path):
    (run,) = runs.load([write_run(tmp_path / "a", [1.0], without=("tokens",))])
    with pytest.raises(UserError, match="does not record tokens: plot it over steps"):
        run.curve("loss", "tokens")


def test_names_must_fit_the_runs(tmp_path):
    path = write_run(tmp_path / "a", [1.0])
    with pytest.raises(UserError, match="2 names for 1 run:"):
        runs.load([path], ["x", "y"])
    with pytest.raises(UserError, match="given twice"):
        runs.load([path, path / "metrics.jsonl"])
