"""Loss curves of several runs in a picture: `draw([bf16, coat], Path("plot.png"))`.

Training losses are means of the last `smooth` records, held-out losses are points. Panels below
have learning rates, gradient norms and a config's own metrics, and a statistic of telemetry if one
is asked for. Of several runs the first is the baseline: wide and pale, with the others on top.
"""

import io
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float

from coat_jax import writing
from coat_jax.errors import UserError
from coat_jax.files import require_regular
from coat_jax.printable import amount, printable
from coat_jax.training.config.run import LOGGED
from coat_jax.training.report import metrics
from coat_jax.training.report.chart import CHART, LINES, PALE
from coat_jax.training.report.telemetry import PREFIX

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Curve: TypeAlias = Float[np.ndarray, "2 N"]  # the x axis and the values
# The x axes: a record's field, a unit of it, and the unit's name.
AXES = {
    "steps": ("step", 1, "step"),
    "tokens": ("tokens", 1e6, "million tokens"),
    "time": ("seconds", 3600, "hours"),
}
HELD_OUT = "held_out_"
PANELS = 24  # of a config's own metrics, at most
NAMED = 8  # tensors in the legend
# A panel is at most STRETCH times as high as this share of its values: outliers would flatten them.
SHOWN_QUANTILE, STRETCH = 0.96, 2.5
SHARES = ("underflow", "subnormal", "saturated", "zero", "floor")  # on a logarithmic scale
SMALLEST = 1e-6  # share below which the scale is linear, to zero
TELEMETRY = re.compile(rf"{PREFIX}(?:(?:.*/)?layers/\d+/)?(?P<tensor>.+)/(?P<statistic>\w+)")


class Run(NamedTuple):
    """The records of a run: a curve for each key. null is NaN."""

    name: str
    curves: dict[str, Curve]

    def curve(self, key: str) -> Curve:
        """Returns the points of a key; none if the run never recorded it."""
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


def _read_curves(file: Path, over: str) -> dict[str, Curve]:
    """Returns the points of each key; tokens or seconds may be those of an earlier record."""
    require_regular(file, "log of a run")
    field, unit, _ = AXES[over]
    points = defaultdict(list)
    x = None
    for record in metrics.read(file):
        x = record.get(field, x)
        for key, value in record.items():
            if x is not None and not isinstance(value, str):
                points[key].append((x / unit, value))
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
    statistic: str | None = None,
) -> None:
    """Writes a picture of the runs in some folders to `out`, which ends in .png.

    Args:
        paths: the folders.
        out: the picture; an earlier one is replaced.
        over: the x axis, a key of AXES.
        smooth: how many records each point is the mean of; by default a fiftieth of the shortest
            run's, at least 10.
        names: of the runs, by default their folders'.
        statistic: of telemetry, which is drawn of a run alone.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.rcsetup import cycler

    if out.suffix.lower() != ".png":
        raise UserError(f"{out} does not end in .png.")
    if statistic is not None and len(paths) > 1:
        raise UserError(f"A statistic of telemetry is drawn of one run, not of {len(paths)}.")
    loaded = load(paths, names, over)
    smooth = smooth or max(min(run.curves["loss"].shape[1] for run in loaded) // 50, 10)
    keys = dict.fromkeys(key for run in loaded for key in run.curves)
    own = dict.fromkeys(k.removeprefix(HELD_OUT) for k in keys if k not in LOGGED and "/" not in k)
    small = [key for key in ("learning_rate", "gradient_norm") if key in keys] + [*own][:PANELS]
    heights = [3.2, *[1.0] * len(small), *[2.0] * (statistic is not None)]
    content = io.BytesIO()
    # Names of runs and metrics may have a $, which would begin a formula.
    colors = LINES if len(loaded) == 1 else (PALE, *LINES)
    looks = cycler(linestyle=("-", "--", ":", "-.")) * cycler(color=colors)
    with mpl.rc_context(CHART | {"text.parse_math": False, "axes.prop_cycle": looks}):
        figure = Figure(figsize=(9, 1.4 * sum(heights)))  # not pyplot's: no window, no backend
        panels = figure.subplots(len(heights), sharex=True, height_ratios=heights, squeeze=False)
        for axes, key in zip(panels.flat, ["loss", *small], strict=False):
            _draw_curves(axes, key, loaded, 1 if key == "learning_rate" else smooth)
            axes.set_title(key.replace("_", " ") if key in LOGGED else printable(key))
        axes = panels[-1, 0]
        if statistic is not None:
            _draw_statistic(axes, loaded[0], statistic)
        axes.set_xlabel(AXES[over][2])
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter("{x:,.10g}")
        axes.locator_params(axis="x", integer=over == "steps")
        mean = f", mean of {smooth:,} records" if smooth > 1 else ""
        points = "; points: held out" if "held_out_loss" in keys else ""
        loss = panels[0, 0]
        loss.set_title(f"Training loss{mean}{points}")
        # Not as labels of the lines: matplotlib leaves out those that begin with an underscore.
        labels = [_label(run, smooth) for run in loaded]
        loss.legend(loss.get_lines()[::2], labels, loc="upper right")
        figure.savefig(content, format="png")
    writing.replace(out, content.getvalue())


def _draw_curves(axes: "Axes", key: str, loaded: list[Run], smooth: int) -> None:
    """Draws for each run the means of a key's values, and its held-out values as points."""
    shown = []
    for number, run in enumerate(loaded):
        width = 5.0 if number == 0 and len(loaded) > 1 else 1.5
        x, y = run.curve(key)
        mean = moving_mean(y, smooth)
        (line,) = axes.plot(x, mean, lw=width)
        x, y = run.curve(f"{HELD_OUT}{key}")
        axes.plot(x, y, "o", color=line.get_color(), ms=4 + width, mec="white", mew=1.2, zorder=3)
        shown += [mean[np.isfinite(mean)], y[np.isfinite(y)]]
    values = np.concatenate(shown)
    if len(values):
        bottom = values.min()
        most = bottom + STRETCH * (np.quantile(values, SHOWN_QUANTILE) - bottom)
        top = min(values.max(), most)
        margin = 0.06 * (top - bottom) or 1.0
        axes.set_ylim(bottom - margin, top + margin)


def moving_mean(y: Float[np.ndarray, " N"], window: int) -> Float[np.ndarray, " N"]:
    """Returns the mean of each value and those before it, `window` in all; NaN does not count."""
    if len(y) == 0:
        return y
    finite = np.isfinite(y)
    # The difference of two running sums would be faster, but lose all that follows a huge value.
    total = np.convolve(np.where(finite, y, 0.0), np.ones(window))[: len(y)]
    count = np.convolve(finite, np.ones(window))[: len(y)]
    with np.errstate(invalid="ignore"):  # 0 / 0 is NaN
        return np.asarray(total / count)


def _label(run: Run, smooth: int) -> str:
    final = np.mean(run.curves["loss"][1][-smooth:])
    ends = f"ends at {final:.4g}" if np.isfinite(final) else "ends without a finite loss"
    held_out = "".join(f", held out {y:.4g}" for y in run.curve("held_out_loss")[1][-1:])
    return printable(f"{run.name}, {ends}{held_out}")


def _draw_statistic(axes: "Axes", run: Run, statistic: str) -> None:
    """Draws the maximum over layers for each kind of tensor; the largest are in the legend."""
    found: dict[str, dict[float, float]] = defaultdict(dict)
    for key, curve in run.curves.items():
        parts = TELEMETRY.fullmatch(key)
        if parts and parts["statistic"] == statistic:
            points = found[printable(parts["tensor"])]
            for x, y in curve.T.tolist():
                points[x] = np.fmax(y, points.get(x, math.nan))  # of NaN and a number: the number
    if not found:
        raise UserError(
            f"{run.name} has no records of {statistic}: they are written when a run in FP8 trains "
            "with --telemetry.every, 100 for instance."
        )
    curves = {tensor: np.array(sorted(points.items())).T for tensor, points in found.items()}
    names = sorted(curves, key=lambda tensor: -np.fmax.reduce(curves[tensor][1], initial=0))
    lines = [line for name in names for line in axes.plot(*curves[name], marker="o", ms=2)]
    if statistic in SHARES:
        axes.set_yscale("symlog", linthresh=SMALLEST)
        axes.yaxis.set_major_formatter("{x:g}")
    named = names[:NAMED]
    axes.figure.legend(lines[:NAMED], named, loc="outside lower left", ncols=4, fontsize=8)
    axes.set_title(f"{statistic}, the maximum over layers")
