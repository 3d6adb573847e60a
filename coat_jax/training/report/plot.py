"""Loss curves of several runs in a picture: `draw([bf16, coat], Path("plot.png"))`.

Training losses are means of the last `smooth` records, held-out losses are points. Panels below
have learning rates, gradient norms and a config's own metrics. Of several runs the first is the
baseline: wide and pale, with the others on top.
"""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Float

from coat_jax.errors import UserError
from coat_jax.files import require_regular
from coat_jax.printable import amount, printable
from coat_jax.training.config.run import LOGGED
from coat_jax.training.report import metrics
from coat_jax.training.report.chart import LINES, PALE, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

AXES = {"steps": "step", "tokens": "tokens", "time": "seconds"}
UNITS = {
    "steps": ((1, "step"),),
    "tokens": ((1, "tokens"), (1e6, "million tokens"), (1e9, "billion tokens")),
    "time": ((1, "seconds"), (60, "minutes"), (3600, "hours"), (86400, "days")),
}
PANELS = 24  # of a config's own metrics, at most
# A panel is at most STRETCH times as high as this share of its values: outliers would flatten them.
SHOWN_QUANTILE, STRETCH = 0.96, 2.5


class Run(NamedTuple):
    """The records of a run: by key, the axis and the values. null is NaN."""

    name: str
    curves: dict[str, Float[np.ndarray, "2 N"]]

    def curve(self, key: str) -> Float[np.ndarray, "2 N"]:
        """The points of a key; none if the run never recorded it."""
        return self.curves.get(key, np.empty((2, 0)))


def load(paths: Sequence[Path], names: Sequence[str] = (), over: str = "steps") -> list[Run]:
    """Reads runs from their folders, whose names they have by default."""
    if names and len(names) != len(paths):
        raise UserError(
            f"{amount(len(names), 'name')} for {amount(len(paths), 'run')}: name all or none."
        )
    files = [path / metrics.FILE if path.is_dir() else path for path in paths]
    folders = [file.resolve().parent.name for file in files]
    if len(set(folders)) < len(folders):
        folders = [str(file.parent) for file in files]
    pairs = zip(names or folders, files, strict=True)
    return [Run(name, _read_curves(file, over)) for name, file in pairs]


def _read_curves(file: Path, over: str) -> dict[str, Float[np.ndarray, "2 N"]]:
    """The points of each key; a record without tokens or seconds takes those of the one before."""
    require_regular(file, "log of a run")
    points = defaultdict(list)
    x = None
    for record in metrics.read(file):
        x = record.get(AXES[over], x)
        for key, value in record.items():
            if x is not None and not isinstance(value, str):
                points[key].append((x, value))
    if "loss" not in points:
        raise UserError(f"{file} has no losses over {over}: train the run, or plot it over steps.")
    return {key: np.array(pairs, float).T for key, pairs in points.items()}


def draw(
    paths: Sequence[Path],
    out: Path,
    *,
    over: str = "steps",
    smooth: int | None = None,
    names: Sequence[str] = (),
) -> None:
    """Writes a picture of the runs in some folders to `out`, which ends in .png.

    Args:
        paths: the folders.
        out: the picture; an earlier one is replaced.
        over: the x axis, a key of AXES.
        smooth: how many records each point is the mean of; by default a fiftieth of the shortest
            run's, at least 10.
        names: of the runs, by default their folders'.
    """
    if smooth is not None and smooth < 1:
        raise UserError(f"{smooth=} records have no mean: take 1 or more.")
    loaded = load(paths, names, over)
    losses = [run.curves["loss"] for run in loaded]
    smooth = smooth or max(min(len(y) for _, y in losses) // 50, 10)
    longest = max(x[-1] for x, _ in losses)
    fitting = [unit for unit in UNITS[over] if longest >= 2 * unit[0]]
    size, unit = fitting[-1] if fitting else UNITS[over][0]
    keys = dict.fromkeys(key for run in loaded for key in run.curves)
    own = [key for key in keys if key not in LOGGED and "/" not in key]
    small = [key for key in ("learning_rate", "gradient_norm") if key in keys] + own[:PANELS]
    heights = [3.2, *[1.0] * len(small)]
    with picture(out, (9, 1.4 * sum(heights))) as figure:
        panels = figure.subplots(len(heights), sharex=True, height_ratios=heights, squeeze=False)
        for axes, key in zip(panels.flat, ["loss", *small], strict=True):
            _draw_curves(axes, key, loaded, 1 if key == "learning_rate" else smooth, size)
            axes.set_title(key.replace("_", " ") if key in LOGGED else printable(key))
        axes.set_xlabel(unit)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter("{x:,.10g}")
        axes.locator_params(axis="x", integer=over == "steps")
        mean = f", mean of {smooth:,} records" if smooth > 1 else ""
        points = "; points: held out" if "held_out_loss" in keys else ""
        loss = panels[0, 0]
        loss.set_title(f"Training loss{mean}{points}")
        labels = [_label(run, smooth) for run in loaded]
        loss.legend(loss.get_lines()[::2], labels, loc="upper right")


def _draw_curves(axes: "Axes", key: str, loaded: list[Run], smooth: int, size: float) -> None:
    """Draws for each run the means of a key's values, and its held-out values as points."""
    shown = []
    for run, (color, width, style) in zip(loaded, looks_of(len(loaded)), strict=True):
        x, y = run.curve(key)
        mean = smoothed(y, smooth)
        axes.plot(x / size, mean, color=color, linewidth=width, linestyle=style)
        x, y = run.curve(f"held_out_{key}")
        axes.plot(x / size, y, "o", ms=4 + width, color=color, mec="white", mew=1.2, zorder=3)
        shown += [mean[np.isfinite(mean)], y[np.isfinite(y)]]
    values = np.concatenate(shown)
    if len(values):
        bottom = values.min()
        most = bottom + STRETCH * (np.quantile(values, SHOWN_QUANTILE) - bottom)
        top = min(values.max(), most)
        margin = 0.06 * (top - bottom) or 1.0
        axes.set_ylim(bottom - margin, top + margin)


def looks_of(count: int) -> list[tuple[str, float, str]]:
    """A colour, a width and a style for each run; of several, the first is pale and wide."""
    styles = ("-", "--", ":", "-.")
    lines = itertools.cycle((color, 1.5, style) for style in styles for color in LINES)
    baseline = [(PALE, 5.0, "-")] if count > 1 else []
    return list(itertools.islice(itertools.chain(baseline, lines), count))


def smoothed(y: Float[np.ndarray, " N"], window: int) -> Float[np.ndarray, " N"]:
    """The mean of each value and those before it, `window` in all; NaN does not count."""
    if len(y) == 0:
        return y
    finite = np.isfinite(y)
    # The difference of two running sums would be faster, but lose all that follows a huge value.
    total = np.convolve(np.where(finite, y, 0.0), np.ones(window))[: len(y)]
    count = np.convolve(finite, np.ones(window))[: len(y)]
    return np.divide(total, count, out=np.full(len(y), np.nan), where=count > 0)


def _label(run: Run, smooth: int) -> str:
    final = np.mean(run.curves["loss"][1][-smooth:])
    ends = f"ends at {final:.4g}" if np.isfinite(final) else "ends without a finite loss"
    held_out = "".join(f", held out {y:.4g}" for y in run.curve("held_out_loss")[1][-1:])
    return printable(f"{run.name}, {ends}{held_out}")
