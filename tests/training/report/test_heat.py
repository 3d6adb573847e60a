"""A heat map has each number in its place."""

import json

import numpy as np
import pytest
from matplotlib.figure import Figure
from run_cases import write_run

from coat_jax.errors import UserError
from coat_jax.numerics.statistics import Statistics
from coat_jax.telemetry import MomentStatistics
from coat_jax.training.report import heat, runs

TENSORS = ("attention/input", "mlp/gate/gradient")


def write_watched_run(folder):
    """A number is 0.001 times its layer plus 0.0001 times its tensor, times the record's number."""
    write_run(folder, [3.0, 2.0])
    with (folder / "metrics.jsonl").open("a") as file:
        for i, step in enumerate((10, 20), start=1):
            record = {"step": step, "fp8/norm/saved/error": 0.5 * i, "fp8/embed/mu/k": 2.0}
            for layer in range(3):
                for place, tensor in enumerate(TENSORS):
                    name = f"fp8/layers/{layer}/{tensor}"
                    record[f"{name}/error"] = i * (1e-3 * layer + 1e-4 * place)
                    record[f"{name}/underflow"] = 0.0
            record["fp8/layers/0/mlp/gate/gradient/headroom"] = None
            file.write(json.dumps(record) + "\n")
    return folder


@pytest.fixture
def run(tmp_path):
    return write_watched_run(tmp_path / "$run_1")


def test_numbers_have_their_places(run):
    (loaded,) = runs.load([run])
    maps = heat.maps_of(loaded, "error")
    assert maps.tensors == [*TENSORS, "norm/saved"]
    np.testing.assert_allclose(maps.layers, [[0, 2e-3, 4e-3], [2e-4, 2.2e-3, 4.2e-3]])
    np.testing.assert_array_equal(maps.steps, [10, 20])
    np.testing.assert_allclose(maps.over_steps, [[2e-3, 4e-3], [2.1e-3, 4.2e-3], [0.5, 1.0]])


def test_a_tensor_without_a_number_leaves_a_gap(run):
    """It was not finite, or another precision did not have it."""
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 30, "fp8/layers/2/mlp/input/error": 0.25}) + "\n")
    (loaded,) = runs.load([run])
    maps = heat.maps_of(loaded, "error")
    row = maps.tensors.index("mlp/input")
    np.testing.assert_array_equal(maps.layers[row], [np.nan, np.nan, 0.25])
    np.testing.assert_array_equal(maps.over_steps[row], [np.nan, np.nan, 0.25])
    assert np.isnan(maps.over_steps[0, -1])
    assert np.isnan(heat.maps_of(loaded, "headroom").layers).all()


def test_the_picture_says_what_it_shows(tmp_path, run, monkeypatch):
    kept = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: kept.append(figure))
    heat.draw(run, tmp_path / "heat.png", statistic="error")
    (figure,) = kept
    assert figure.get_suptitle() == "Relative error: $run_1"
    left, right, _ = figure.axes
    assert [label.get_text() for label in left.get_yticklabels()] == list(TENSORS)
    assert left.images[0].get_array().shape == (2, 3)
    assert right.images[0].get_array().shape == (3, 2)
    assert [label.get_text() for label in right.get_xticklabels()] == ["10", "20"]


@pytest.mark.filterwarnings("error")
def test_there_is_a_picture_whatever_the_numbers_and_names_are(tmp_path, run):
    """All zero, nothing finite, no tensor in a layer; and names of others as they are.

    Not as mathematics, nor in as many columns as such a number has layers.
    """
    names = (
        r"layers/0/$\frac$",
        r"$\frac$",
        "layers/0/\x1b",
        "layers/999999999/x",
        f"layers/{'9' * 5000}/x",
        "layers/\u0663/x",
    )
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 30} | {f"fp8/{name}/error": 0.25 for name in names}) + "\n")
    (loaded,) = runs.load([run])
    assert heat.maps_of(loaded, "error").layers.shape[1] == 3
    for statistic in ("error", "underflow", "headroom", "k"):
        out = tmp_path / f"{statistic}.png"
        heat.draw(run, out, statistic=statistic)
        assert out.stat().st_size > 10_000


def test_every_statistic_of_telemetry_has_a_title():
    assert {*Statistics._fields, *MomentStatistics._fields} == set(heat.TITLES)


def test_a_run_without_telemetry_says_how_to_have_it(tmp_path):
    write_run(tmp_path / "run", [3.0])
    with pytest.raises(UserError, match=r"--telemetry\.every, 100 for instance"):
        heat.draw(tmp_path / "run", tmp_path / "heat.png", statistic="error")
