"""A picture and a page of runs: what they show, and that the page is inert."""

import errno
import json
import os
import re
import shutil
import subprocess

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from run_cases import write_run

from coat_jax import writing
from coat_jax.errors import UserError
from coat_jax.training.report import page, plot, runs
from coat_jax.training.report.chart import LINES, PALE, looks_of
from coat_jax.training.report.plot import draw


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


def scripts_of(text):
    """The texts of a page's script elements."""
    return re.findall(r"<script[^>]*>(.*?)</script", text, re.DOTALL | re.IGNORECASE)


def data_of(path):
    return json.loads(scripts_of(path.read_text("utf-8"))[0])


def test_there_are_a_picture_and_a_page(tmp_path, two):
    """Which needs nothing from elsewhere, and whose script node can parse."""
    draw(two, tmp_path / "plot.PNG")
    height, width, _ = imread(tmp_path / "plot.PNG").shape
    assert width > height > 500
    assert [run["name"] for run in data_of(tmp_path / "plot.html")["runs"]] == ["bf16", "coat"]
    text = (tmp_path / "plot.html").read_text("utf-8")
    assert not re.search(r"\b(src|href)\s*=", text)
    assert "default-src 'none'" in text
    assert "@import" not in text
    assert "url(#" in text  # clips to a part of itself,
    assert text.count("url(") == 1  # and to nothing else
    if shutil.which("node"):
        (tmp_path / "page.js").write_text(scripts_of(text)[1])
        subprocess.run(["node", "--check", tmp_path / "page.js"], check=True)


def test_the_legend_says_how_runs_end(tmp_path, two, figure):
    draw(two, tmp_path / "plot.png", smooth=1, names=["BF16", "COAT"])
    legend = figure().axes[0].get_legend().get_texts()
    assert [text.get_text() for text in legend] == [
        "BF16, ends at 0.474, held out 0.500",
        "COAT, ends at 0.484, held out 0.510",
    ]


def test_the_mean_is_of_a_fiftieth_of_the_shortest_run(tmp_path, figure):
    paths = [write_run(tmp_path / str(n), [1.0] * n) for n in (1000, 2000)]
    draw(paths, tmp_path / "plot.png")
    assert figure().axes[0].get_title(loc="left") == "Training loss, mean of 20 records"


def test_a_run_that_diverged_says_so(tmp_path, figure):
    draw([write_run(tmp_path / "a", [3.0, 2.0, None])], tmp_path / "plot.png")
    legend = figure().axes[0].get_legend().get_texts()
    assert [text.get_text() for text in legend] == ["a, ends without a finite loss"]
    assert data_of(tmp_path / "plot.html")["runs"][0]["final"]["loss"] is None


@pytest.mark.parametrize(
    ("over", "label", "last"),
    [("steps", "step", 40), ("tokens", "tokens", 2560), ("time", "seconds", 20)],
)
def test_the_axis_is_what_was_asked_for(tmp_path, two, figure, over, label, last):
    draw(two, tmp_path / "plot.png", over=over)
    axes = figure().axes[0]
    assert axes.get_xlabel() == label
    assert axes.lines[0].get_xdata()[-1] == last
    assert data_of(tmp_path / "plot.html")["over"] == over


def test_the_first_losses_are_inside_and_steps_are_whole(tmp_path, figure):
    losses = 2 + 4 * 0.97 ** np.arange(12)
    draw([write_run(tmp_path / "a", losses.tolist())], tmp_path / "plot.png")
    for axes in figure().axes:
        assert axes.get_ylim()[1] > max(axes.lines[0].get_ydata())
        assert all(tick == round(tick) for tick in axes.get_xticks())


def test_a_spike_does_not_flatten_the_rest(tmp_path, figure):
    draw([write_run(tmp_path / "a", [*[3.0, 2.0] * 50, 1e6])], tmp_path / "plot.png", smooth=1)
    assert figure().axes[0].get_ylim()[1] < 10


@pytest.mark.parametrize(
    ("over", "longest", "unit"),
    [
        ("tokens", 1.9e6, "tokens"),
        ("tokens", 3e11, "billion tokens"),
        ("time", 7199, "minutes"),
        ("time", 7200, "hours"),
        ("time", 1e6, "days"),
        ("steps", 1e6, "step"),
    ],
)
def test_units_fit_the_longest_run(over, longest, unit):
    column = runs.Column(np.array([0]), np.array([longest]))
    assert plot._unit([runs.RecordedRun("a", None, {runs.AXES[over]: column})], over)[1] == unit


def test_each_metric_that_runs_have_is_drawn_under_its_name(tmp_path, figure):
    own = ["weight_norm", "$x_1$", "hasOwnProperty"]
    paths = [
        write_run(tmp_path / "a", [2.0, 1.0], own=own),
        write_run(tmp_path / "b", [2.0, 1.0], own=own[:1], without=["learning_rate"]),
    ]
    draw(paths, tmp_path / "plot.png", smooth=1)
    panels = figure().axes
    titles = [axes.get_title(loc="left") for axes in panels]
    assert titles[1:] == ["learning rate", "gradient norm", *own]
    assert list(panels[3].lines[0].get_ydata()) == [1, 2]
    data = data_of(tmp_path / "plot.html")
    assert [panel["key"] for panel in data["small"]][2:] == own
    assert [set(own) & set(run["curves"]) for run in data["runs"]] == [set(own), set(own[:1])]
    draw(paths[1:], tmp_path / "plot.png")
    assert len(figure().axes) == 3


def test_no_two_runs_look_alike():
    assert looks_of(1)[0].color == LINES[0]
    looks = looks_of(25)
    assert looks[0].color == PALE
    assert len(set(looks)) == 25
    assert all(look.style in page.DASHES for look in looks)


def test_names_are_data_and_never_markup(tmp_path, two):
    names = ["</script><script>alert(1)</script>", '<!-- & "quotes" \u2028 {{data}}']
    draw(two, tmp_path / "plot.png", names=names)
    text = (tmp_path / "plot.html").read_text("utf-8")
    assert len(scripts_of(text)) == 2
    assert not set("<>&").intersection(scripts_of(text)[0])
    assert [run["name"] for run in data_of(tmp_path / "plot.html")["runs"]] == names
    assert "innerHTML" not in text


def test_a_long_run_is_thinned_by_means(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "POINTS", 4)
    draw([write_run(tmp_path / "a", [1.0, 3.0, 2.0, 4.0, 5.0, 7.0, 6.0])], tmp_path / "p.png")
    data = data_of(tmp_path / "p.html")
    loss = data["runs"][0]["curves"]["loss"]
    assert loss["y"] == [2.0, 3.0, 6.0, 6.5]
    assert loss["steps"] == [2, 4, 6, 7]
    assert (data["thin"], data["smooth"]) == (2, 5)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("plot.png", {"smooth": 0}, "smooth=0 records"),
        ("plot.png", {"names": ["x"]}, "1 name for 2 runs"),
        ("plot.pdf", {}, r"plot\.pdf does not end in \.png"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(
    tmp_path, two, name, options, message
):
    with pytest.raises(UserError, match=message):
        draw(two, tmp_path / name, **options)
    assert not list(tmp_path.glob("plot.*"))


@pytest.mark.parametrize(
    "names", [["$x_1$", "_run"], [r"$\frac{", "\x1b[2J"], ["50% & more", "a$b"]]
)
def test_names_are_shown_as_they_are(names, tmp_path, two, figure):
    """matplotlib takes $ for mathematics, and hides what begins with an underscore."""
    draw(two, tmp_path / "plot.png", names=names)
    shown = figure().axes[0].get_legend().get_texts()
    wanted = [name.replace("\x1b", r"\x1b") for name in names]
    assert [text.get_text().partition(", ends")[0] for text in shown] == wanted
    assert not any(text.get_parse_math() for text in shown)
    assert [run["name"] for run in data_of(tmp_path / "plot.html")["runs"]] == names


def test_an_axis_without_numbers_is_refused(tmp_path, two):
    metrics = two[0] / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"seconds": 0.5', '"seconds": null'))
    with pytest.raises(UserError, match="has time that are not numbers: plot over another axis"):
        draw(two, tmp_path / "plot.png", over="time")


def test_on_a_full_disk_the_earlier_picture_stays(two, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out = tmp_path / "plot.png"
    draw(two, out)
    before = out.read_bytes()
    monkeypatch.setattr(writing, "write_durably", full)
    with pytest.raises(writing.DiskFull, match=f"plot.png does not fit in {tmp_path}"):
        draw(two[:1], out)
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    ("losses", "held_out"),
    [([2.0], None), ([None, None], None), ([3.0, 1e308, 1.0], 1e308), ([3.0, -1e308], -1e308)],
)
@pytest.mark.filterwarnings("error")
def test_there_is_a_picture_whatever_the_losses_are(tmp_path, losses, held_out):
    """Values beyond what can be drawn are left out."""
    run = write_run(tmp_path / "run", losses, held_out=held_out, own=["own"])
    draw([run], tmp_path / "plot.png", smooth=1, over="time")
    assert imread(tmp_path / "plot.png").size
