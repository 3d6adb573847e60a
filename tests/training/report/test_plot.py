"""A picture of runs shows what they recorded, whatever that is."""

import errno
import json
import math
import os
from unittest import mock

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from coat_jax.errors import UserError
from coat_jax.training.report import plot
from coat_jax.training.report.chart import LINES, PALE
from coat_jax.training.report.plot import draw


def write_run(folder, losses, *, held_out=None, without=(), own=()):
    """A run with a record per loss, and after its last step an evaluation; returns its folder."""
    folder.mkdir(parents=True)
    with (folder / "metrics.jsonl").open("w") as file:
        for step, loss in enumerate(losses, start=1):
            record = {
                "step": step,
                "tokens": 64 * step,
                "seconds": 0.5 * step,
                "loss": loss,
                "learning_rate": 1e-3 / step,
                "gradient_norm": 1.0,
                **dict.fromkeys(own, step),
            }
            kept = {key: value for key, value in record.items() if key not in without}
            file.write(json.dumps(kept) + "\n")
        if held_out is not None:
            file.write(json.dumps({"step": len(losses), "held_out_loss": held_out}) + "\n")
    return folder


@pytest.fixture
def two(tmp_path):
    falling = 3 / np.sqrt(np.arange(1, 41))
    return [
        write_run(tmp_path / "bf16", falling.tolist(), held_out=0.5),
        write_run(tmp_path / "coat", (falling + 0.01).tolist(), held_out=0.51),
    ]


@pytest.fixture
def figure(monkeypatch):
    """The figure of the last picture, instead of a file."""
    kept = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: kept.append(figure))
    return lambda: kept[-1]


def test_the_legend_says_how_runs_end(tmp_path, two, figure):
    diverged = write_run(tmp_path / "a", [3.0, 2.0, None])
    draw([*two, diverged], tmp_path / "plot.png", smooth=1, names=["BF16", "COAT", "a"])
    legend = figure().axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == [
        "BF16, ends at 0.4743, held out 0.5",
        "COAT, ends at 0.4843, held out 0.51",
        "a, ends without a finite loss",
    ]


def test_the_mean_is_of_a_fiftieth_of_the_shortest_run(tmp_path, figure):
    paths = [write_run(tmp_path / str(n), [1.0] * n) for n in (1000, 2000)]
    draw(paths, tmp_path / "plot.png")
    assert figure().axes[0].get_title(loc="left") == "Training loss, mean of 20 records"


@pytest.mark.parametrize(
    ("over", "label", "last"),
    [("steps", "step", 40), ("tokens", "million tokens", 0.00256), ("time", "hours", 20 / 3600)],
)
def test_the_axis_is_what_was_asked_for(tmp_path, two, figure, over, label, last):
    """An evaluation says its step only: it stands where the record before it does."""
    draw(two, tmp_path / "plot.png", over=over)
    axes = figure().axes
    assert axes[-1].get_xlabel() == label
    assert axes[0].lines[0].get_xdata()[-1] == last
    assert (axes[0].lines[1].get_xdata(), axes[0].lines[1].get_ydata()) == ([last], [0.5])


def test_the_first_losses_are_inside_steps_are_whole_and_a_spike_does_not_flatten_the_rest(
    tmp_path, figure
):
    losses = [*(2 + 4 * 0.97 ** np.arange(12)), *[3.0, 2.0] * 50, 1e6]
    draw([write_run(tmp_path / "a", losses)], tmp_path / "plot.png", smooth=1)
    assert 6 < figure().axes[0].get_ylim()[1] < 20
    assert all(tick == round(tick) for tick in figure().axes[-1].get_xticks())


def test_each_metric_that_runs_have_is_drawn_under_its_name(tmp_path, figure):
    own = ["weight_norm", "$x_1$"]
    paths = [
        write_run(tmp_path / "a", [2.0, 1.0], own=own),
        write_run(tmp_path / "b", [2.0, 1.0], own=own[:1], without=["learning_rate"]),
    ]
    draw(paths, tmp_path / "plot.png", smooth=1)
    panels = figure().axes
    titles = [axes.get_title(loc="left") for axes in panels]
    assert titles[1:] == ["learning rate", "gradient norm", *own]
    assert list(panels[3].lines[0].get_ydata()) == [1, 2]
    draw(paths[1:], tmp_path / "plot.png")
    assert len(figure().axes) == 3


def test_no_two_runs_look_alike(tmp_path, figure):
    paths = [write_run(tmp_path / str(i), [2.0, 1.0], held_out=1.0) for i in range(25)]
    draw(paths, tmp_path / "plot.png")
    lines = figure().axes[0].lines
    looks = [(line.get_color(), line.get_linestyle()) for line in lines[::2]]
    assert looks[:2] == [(PALE, "-"), (LINES[0], "-")]
    assert len(set(looks)) == 25
    assert [line.get_color() for line in lines[1::2]] == [color for color, _ in looks]
    draw(paths[:1], tmp_path / "plot.png")
    assert figure().axes[0].lines[0].get_color() == LINES[0]


def test_a_held_out_statistic_is_in_the_panel_of_its_counterpart(tmp_path, figure):
    """Also where training does not record it."""
    run = write_run(tmp_path / "a", [2.0, 1.0], own=["accuracy", "held_out_accuracy", "held_out_x"])
    draw([run], tmp_path / "plot.png", smooth=1)
    panels = {axes.get_title(loc="left"): axes for axes in figure().axes[3:]}
    assert list(panels) == ["accuracy", "x"]
    for name, (line, points) in {name: axes.lines for name, axes in panels.items()}.items():
        assert (line.get_marker(), points.get_marker()) == ("None", "o")
        assert list(points.get_ydata()) == [1, 2]
        assert list(line.get_ydata()) == ([1, 2] if name == "accuracy" else [])


@pytest.mark.parametrize("names", [["$x_1$", "_run"], [r"$\frac{", "\x1b[2J"]])
def test_names_are_shown_as_they_are(names, tmp_path, two, figure):
    """matplotlib takes $ for mathematics."""
    draw(two, tmp_path / "plot.png", names=names)
    shown = figure().axes[0].get_legend().get_texts()
    wanted = [name.replace("\x1b", r"\x1b") for name in names]
    assert [text.get_text().partition(", ends")[0] for text in shown] == wanted
    assert not any(text.get_parse_math() for text in shown)


def test_on_a_full_disk_the_earlier_picture_stays(two, tmp_path, monkeypatch):
    out = tmp_path / "plot.png"
    draw(two, out)
    before = out.read_bytes()
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=full))
    with pytest.raises(OSError, match="No space left"):
        draw(two[:1], out)
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    ("losses", "held_out"),
    [([2.0], None), ([None, None], None), ([3.0, 3e38, 1.0], 3e38), ([3.0, -3e38], -3e38)],
)
@pytest.mark.filterwarnings("error")
def test_there_is_a_picture_whatever_the_losses_are(tmp_path, losses, held_out):
    """Up to the largest in FP32."""
    run = write_run(tmp_path / "run", losses, held_out=held_out, own=["own"])
    draw([run], tmp_path / "plot.PNG", smooth=1, over="time")
    height, width, _ = imread(tmp_path / "plot.PNG").shape
    assert width > height > 500


# --- A statistic of telemetry ----------------------------------------------------------------


@pytest.fixture
def watched(tmp_path):
    """A number is 10 times its layer plus its tensor's number, times the record's number."""
    folder = write_run(tmp_path / "$run_1", [3.0] * 20)
    with (folder / "metrics.jsonl").open("a") as file:
        for i, step in enumerate((10, 20), start=1):
            record = {"step": step, "fp8/norm/saved/error": 0.5 * i, "fp8/embed/mu/k": 2.0}
            for layer in range(3):
                for place in range(9):
                    name = f"fp8/layers/{layer}/mlp/${place}"
                    record[f"{name}/error"] = i * (10 * layer + place)
                    record[f"{name}/underflow"] = 0.0
            record["fp8/layers/0/mlp/gate/gradient/headroom"] = None
            file.write(json.dumps(record) + "\n")
        file.write(json.dumps({"step": 30, "fp8/layers/1/mlp/$8/error": 0.25}) + "\n")
    return folder


def test_the_panel_of_a_statistic_has_a_line_for_each_kind_of_tensor(tmp_path, watched, figure):
    """The maximum over layers; the largest are named, and no two look alike."""
    draw([watched], tmp_path / "plot.png", statistic="error")
    axes = figure().axes[-1]
    assert axes.get_title(loc="left") == "error, the maximum over layers"
    lines = [[*line.get_ydata()] for line in axes.lines]
    assert lines == [[28, 56, 0.25], *([20 + n, 40 + 2 * n] for n in range(7, -1, -1)), [0.5, 1]]
    named = [text.get_text() for text in axes.figure.legends[0].get_texts()]
    assert named == [f"mlp/${n}" for n in range(8, 0, -1)]
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines}) == 10


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("statistic", ["underflow", "headroom", "k"])
def test_a_statistic_is_drawn_whatever_its_numbers_are(tmp_path, watched, statistic):
    """All zero, nothing finite, no tensor in a layer."""
    draw([watched], tmp_path / "plot.png", statistic=statistic)
    assert imread(tmp_path / "plot.png").size


# --- What is read ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("y", "window", "mean"),
    [
        ([4.0, 2.0, 3.0, 1.0], 2, [4.0, 3.0, 2.5, 2.0]),
        ([4.0, 2.0, 3.0, 1.0], 9, [4.0, 3.0, 3.0, 2.5]),
        ([4.0, 2.0, 3.0, 1.0], 1, [4.0, 2.0, 3.0, 1.0]),
        (
            [math.nan, 2.0, math.nan, math.nan, math.nan],
            2,
            [math.nan, 2.0, 2.0, math.nan, math.nan],
        ),
        ([3.0, 1e300, 3.0, 3.0, 3.0], 2, [3.0, 5e299, 5e299, 3.0, 3.0]),
    ],
)
def test_smoothing_is_the_mean_of_the_last_finite_values(y, window, mean):
    """A huge value changes only the means that contain it."""
    np.testing.assert_allclose(plot.moving_mean(np.array(y), window), mean)


def test_runs_have_their_folders_names_and_paths_where_these_are_alike(tmp_path):
    paths = [write_run(tmp_path / name, [1.0]) for name in ("a/x", "b/x")]
    assert [run.name for run in plot.load(paths)] == [str(path) for path in paths]
    assert [run.name for run in plot.load(paths[:1])] == ["x"]
    assert [run.name for run in plot.load([paths[0] / "metrics.jsonl"])] == ["x"]
    assert [run.name for run in plot.load(paths, ["1", "2"])] == ["1", "2"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        '{"step": 1, "loss": 2',  # torn, with nothing before it
        '{"step": 1, "held_out_loss": 2}\n',
        '{"loss": 2}\n?\n',
    ],
)
def test_a_file_without_losses_is_named(tmp_path, content):
    with pytest.raises(UserError, match="There is no log of a run"):
        plot.load([tmp_path])
    (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(UserError, match=r"metrics\.jsonl has no losses over steps"):
        plot.load([tmp_path])
