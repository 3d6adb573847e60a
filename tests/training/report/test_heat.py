"""A heat map has each number in its place."""

import json

import pytest
from matplotlib.figure import Figure
from run_cases import write_run

from coat_jax.cli.plot import STATISTICS
from coat_jax.errors import UserError
from coat_jax.numerics.statistics import Statistics
from coat_jax.telemetry import MomentStatistics
from coat_jax.training.report import heat, plot

TENSORS = ("attention/input", "mlp/gate/gradient")


@pytest.fixture
def run(tmp_path):
    """A number is 10 times its layer plus its tensor's number, times the record's number."""
    folder = write_run(tmp_path / "$run_1", [3.0, 2.0])
    with (folder / "metrics.jsonl").open("a") as file:
        for i, step in enumerate((10, 20), start=1):
            record = {"step": step, "fp8/norm/saved/error": 0.5 * i, "fp8/embed/mu/k": 2.0}
            for layer in range(3):
                for place, tensor in enumerate(TENSORS):
                    name = f"fp8/layers/{layer}/{tensor}"
                    record[f"{name}/error"] = i * (10 * layer + place)
                    record[f"{name}/underflow"] = 0.0
            record["fp8/layers/0/mlp/gate/gradient/headroom"] = None
            file.write(json.dumps(record) + "\n")
    return folder


def cells_of(run, statistic):
    (loaded,) = plot.load([run])
    return heat.cells_of(loaded, statistic)


def test_numbers_have_their_places(run):
    at_last, over_steps = cells_of(run, "error")
    one, other = TENSORS
    assert [at_last[one, layer] for layer in range(3)] == [0, 20, 40]
    assert [at_last[other, layer] for layer in range(3)] == [2, 22, 42]
    assert len(at_last) == 6
    assert over_steps == {
        (one, 10): 20,
        (one, 20): 40,
        (other, 10): 21,
        (other, 20): 42,
        ("norm/saved", 10): 0.5,
        ("norm/saved", 20): 1.0,
    }


def test_a_tensor_without_a_number_leaves_a_gap(run):
    """It was not finite, or another precision did not have it."""
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 30, "fp8/layers/2/mlp/input/error": 0.25}) + "\n")
    at_last, over_steps = cells_of(run, "error")
    assert at_last == {("mlp/input", 2): 0.25}
    assert over_steps["mlp/input", 30] == 0.25
    assert (TENSORS[0], 30) not in over_steps
    assert cells_of(run, "headroom") == ({}, {})


def test_the_picture_says_what_it_shows(tmp_path, run, monkeypatch):
    kept = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: kept.append(figure))
    heat.draw(run, tmp_path / "heat.png", statistic="error")
    (figure,) = kept
    assert figure.get_suptitle() == "error: $run_1"
    left, right, _ = figure.axes
    assert [label.get_text() for label in left.get_yticklabels()] == list(TENSORS)
    assert left.images[0].get_array().tolist() == [[1e-6, 20, 40], [2, 22, 42]]
    assert right.images[0].get_array().tolist() == [[0.5, 1], [20, 40], [21, 42]]
    assert [label.get_text() for label in right.get_xticklabels()] == ["10", "20"]


def test_the_scale_of_shares_has_numbers(tmp_path, run, monkeypatch):
    kept = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: kept.append(figure))
    heat.draw(run, tmp_path / "heat.png", statistic="underflow")
    scale = kept[0].axes[-1]
    assert "0.01" in [label.get_text() for label in scale.get_yticklabels()]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("statistic", ["error", "underflow", "headroom", "k"])
def test_there_is_a_picture_whatever_the_numbers_are(tmp_path, run, statistic):
    """All zero, nothing finite, no tensor in a layer."""
    out = tmp_path / "heat.png"
    heat.draw(run, out, statistic=statistic)
    assert out.stat().st_size > 10_000


def test_every_statistic_of_telemetry_can_be_drawn():
    assert {*Statistics._fields, *MomentStatistics._fields} == set(STATISTICS)


def test_a_run_without_telemetry_says_how_to_have_it(tmp_path):
    write_run(tmp_path / "run", [3.0])
    with pytest.raises(UserError, match=r"--telemetry\.every, 100 for instance"):
        heat.draw(tmp_path / "run", tmp_path / "heat.png", statistic="error")
