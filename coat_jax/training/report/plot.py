"""Loss curves of several runs, as a picture and as a page.

    draw([bf16, coat], Path("plot.png"))     plot.png, and plot.html beside it

The picture compares: training losses as means of the last `smooth` records, held-out losses as
points, and below, small, learning rates, gradient norms and a config's own metrics where runs have
them. Of several runs the first is the baseline: wide and pale, with the others on top. The page
shows the same interactively.
"""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from coat_jax.errors import UserError
from coat_jax.printable import printable
from coat_jax.training.report import page, runs
from coat_jax.training.report.chart import Look, looks_of, styled_figure
from coat_jax.training.report.output import save_figure
from coat_jax.training.report.runs import RecordedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ACROSS = 3  # small panels in a row, at most
LARGEST = 1e300  # of what is drawn
UNITS = {
    "steps": ((1, "step"),),
    "tokens": ((1, "tokens"), (1e6, "million tokens"), (1e9, "billion tokens")),
    "time": ((1, "seconds"), (60, "minutes"), (3600, "hours"), (86400, "days")),
}


def draw(
    paths: Sequence[Path],
    out: Path,
    *,
    over: str = "steps",
    smooth: int | None = None,
    names: Sequence[str] = (),
    note: Callable[[str], object] = warnings.warn,
) -> None:
    """Writes a picture to `out`, and a page beside it.

    Args:
        paths: folders of runs.
        out: a file that ends in .png. It is replaced if it exists; the page only if it is an
            earlier one.
        over: "steps", "tokens" or "time".
        smooth: how many records each point is the mean of; by default a fiftieth of the shortest
            run's records, at least 10.
        names: what to call the runs instead of their folders.
        note: called with a line if there are more of a config's own metrics than are drawn.

    Raises:
        UserError: if a path is not a run, or a run is damaged or empty, or does not record what the
            axis counts, or another file has the name of the page.
    """
    if smooth is not None and smooth < 1:
        raise UserError(f"{smooth=} records have no mean: take 1 or more.")
    if out.suffix.lower() != ".png":
        raise UserError(f"{out} does not end in .png: the page takes the same name with .html.")
    page_out = out.with_suffix(".html")
    page.require_replaceable(page_out)
    loaded = runs.load(paths, names)
    for run in loaded:
        if not np.all(np.isfinite(run.axis(over).values)):
            raise UserError(f"{run.path} has {over} that are not numbers: plot over another axis.")
    if (own := len(runs.own_metrics(loaded))) > runs.OWN_PANELS:
        note(f"The runs have {own:,} metrics of their own: the first {runs.OWN_PANELS} are drawn.")
    looks = looks_of(len(loaded))
    smooth = smooth or max(min(len(run.columns["loss"].rows) for run in loaded) // 50, 10)
    _picture(loaded, looks, out, over=over, smooth=smooth)
    page.write(loaded, looks, page_out, over=over, smooth=smooth)


def _picture(
    loaded: Sequence[RecordedRun], looks: Sequence[Look], out: Path, *, over: str, smooth: int
) -> None:
    divisor, unit = _unit(loaded, over)
    longest = max(run.axis(over).values[-1] for run in loaded) / divisor
    small = runs.small_panels(loaded)
    rows = _rows(list(small))
    with styled_figure((9, 3.2 + 1.6 * len(rows))) as figure:
        heights = (3.2, *[1.0] * (len(rows) - 1))
        panels = figure.subplot_mosaic(rows, height_ratios=heights, empty_sentinel=None)
        for axes in panels.values():
            axes.set_xlim(0, 1.015 * longest)
            axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.10g}")
            axes.locator_params(axis="x", integer=over == "steps")
        for key in small:
            panels[key].set_title(printable(small[key]), parse_math=False)
            panels[key].locator_params(axis="x", nbins=5)
            window = 1 if key == "learning_rate" else smooth
            _curves(panels[key], key, loaded, looks, over=over, smooth=window, divisor=divisor)
        axes = panels["loss"]
        _curves(axes, "loss", loaded, looks, over=over, smooth=smooth, divisor=divisor)
        axes.set_title(_title(loaded, smooth))
        axes.set_xlabel(unit)
        _legend(axes, [_label(run, smooth) for run in loaded])
        save_figure(figure, out)


def _rows(small: list[str]) -> Any:
    """The loss above, as wide as the rows of small panels; None is an empty place."""
    columns = min(max(len(small), 1), ACROSS)
    below = [small[i : i + columns] for i in range(0, len(small), columns)]
    return [["loss"] * columns, *([*row, *[None] * (columns - len(row))] for row in below)]


def _curves(
    axes: "Axes",
    key: str,
    loaded: Sequence[RecordedRun],
    looks: Sequence[Look],
    *,
    over: str,
    smooth: int,
    divisor: float,
) -> None:
    """One panel: the curves of a key, and those of its held-out twin as points."""
    shown = []
    for run, look in zip(loaded, looks, strict=True):
        x, y = run.curve(key, over)
        mean = runs.smoothed(_drawable(y), smooth)
        axes.plot(
            x / divisor,
            mean,
            color=look.color,
            linewidth=look.width if key == "loss" else 0.6 * look.width,
            linestyle=look.style,
            solid_capstyle="round",
        )
        shown.append(mean[np.isfinite(mean)])
    for run, look in zip(loaded, looks, strict=True):
        x, y = run.curve(f"held_out_{key}", over)
        y = _drawable(y)
        size = 4 + look.width
        axes.plot(x / divisor, y, "o", ms=size, color=look.color, mec="white", mew=1.2)
        shown.append(y[np.isfinite(y)])
    values = np.concatenate(shown)
    if not len(values):
        return
    bottom, top = values.min(), values.max()
    if key != "learning_rate":
        most = np.quantile(values, runs.SHOWN_QUANTILE)
        top = min(top, bottom + runs.STRETCH * (most - bottom))
    margin = 0.06 * (top - bottom) or 1.0
    axes.set_ylim(bottom - margin, top + margin)


def _drawable(values: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
    """The values, NaN where they are so large that matplotlib's arithmetic would overflow."""
    return np.where(np.abs(values) < LARGEST, values, np.nan)


def _legend(axes: "Axes", labels: Sequence[str]) -> None:
    """The names as they are: in a label matplotlib reads $ as mathematics, and hides _run."""
    numbers = [str(number) for number in range(len(labels))]
    legend = axes.legend(axes.get_lines()[: len(labels)], numbers, loc="upper right")
    for text, label in zip(legend.get_texts(), labels, strict=True):
        text.set_parse_math(False)
        text.set_text(printable(label))


def _title(loaded: Sequence[RecordedRun], smooth: int) -> str:
    mean = f", mean of {smooth:,} records" if smooth > 1 else ""
    held_out = any("held_out_loss" in run.columns for run in loaded)
    return f"Training loss{mean}{'; points: held out' if held_out else ''}"


def _label(run: RecordedRun, smooth: int) -> str:
    final, held_out = run.final_loss(smooth), run.held_out_loss()
    if not np.isfinite(final):
        return f"{run.name}, ends without a finite loss"
    ends = f"{run.name}, ends at {_short(final)}"
    return ends if held_out is None else f"{ends}, held out {_short(held_out)}"


def _short(loss: float) -> str:
    return f"{loss:.3f}" if abs(loss) < 1e6 else f"{loss:.3g}"


def _unit(loaded: Sequence[RecordedRun], over: str) -> tuple[float, str]:
    """The largest unit in which the longest run counts at least 2, and its name."""
    longest = max(run.axis(over).values[-1] for run in loaded)
    fitting = [unit for unit in UNITS[over] if longest >= 2 * unit[0]]
    return fitting[-1] if fitting else UNITS[over][0]
