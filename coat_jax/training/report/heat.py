"""A heat map of a statistic of a run's telemetry.

    left     the last record: a row for each tensor of a layer, a column for each layer
    right    all records: a row for each tensor, a column for each step; the maximum over layers

Shares are on a logarithmic scale. Zero has the palest colour; NaN is blank.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from coat_jax.errors import UserError
from coat_jax.training.report.chart import picture
from coat_jax.training.report.plot import Run, load
from coat_jax.training.report.telemetry import PREFIX

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHARES = ("underflow", "subnormal", "saturated", "zero", "floor")
SMALLEST = 1e-6  # share that has a colour of its own
IN_LAYER = re.compile(r"(?:.*/)?layers/(\d+)/(.+)")
Cells: TypeAlias = dict[tuple[str, float], float]  # by row and column


def draw(path: Path, out: Path, *, statistic: str) -> None:
    """Writes a picture of the run in a folder to `out`, which ends in .png."""
    from matplotlib.colors import LogNorm, Normalize

    (run,) = load([path])
    at_last, over_steps = cells_of(run, statistic)
    highest = max(over_steps.values(), default=0.0) or 1.0
    norm = LogNorm(SMALLEST, 1.0, clip=True) if statistic in SHARES else Normalize(0.0, highest)
    size = (12, 2 + 0.2 * len({row for row, _ in over_steps}))
    with picture(out, size, **{"axes.grid": False, "font.size": 8}) as figure:
        left, right = figure.subplots(1, 2)
        _draw_map(left, at_last, norm, "the last record, by layer")
        drawn = _draw_map(right, over_steps, norm, "all records, by step: the largest over layers")
        figure.colorbar(drawn, ax=[left, right], shrink=0.8, format="%g")
        figure.suptitle(f"{statistic}: {run.name}", x=0.01, ha="left")


def cells_of(run: Run, statistic: str) -> tuple[Cells, Cells]:
    """The numbers of both panels, where they are finite."""
    found = {
        key.removeprefix(PREFIX).removesuffix(f"/{statistic}"): curve
        for key, curve in run.curves.items()
        if key.startswith(PREFIX) and key.endswith(f"/{statistic}")
    }
    if not found:
        raise UserError(
            f"{run.name} has no records of {statistic}: they are written when a run in FP8 trains "
            "with --telemetry.every, 100 for instance."
        )
    last = max(steps[-1] for steps, _ in found.values())
    at_last: Cells = {}
    over_steps: Cells = {}
    for tensor, curve in found.items():
        in_layer = IN_LAYER.fullmatch(tensor)
        row = in_layer[2] if in_layer else tensor
        for step, value in zip(*curve, strict=True):
            if np.isfinite(value):
                over_steps[row, step] = max(value, over_steps.get((row, step), value))
                if in_layer and step == last:
                    at_last[row, int(in_layer[1])] = value
    return at_last, over_steps


def _draw_map(axes: "Axes", cells: Cells, norm: Any, title: str) -> Any:
    rows = list(dict.fromkeys(row for row, _ in cells))
    columns = sorted({column for _, column in cells})
    values = np.full((max(len(rows), 1), max(len(columns), 1)), np.nan)
    for (row, column), value in cells.items():
        # A logarithm has no zero.
        values[rows.index(row), columns.index(column)] = value or SMALLEST
    axes.set_title(title)
    axes.set_yticks(range(len(rows)), rows)
    ticks = range(0, len(columns), 1 + len(columns) // 6)
    axes.set_xticks(ticks, [f"{columns[tick]:,.0f}" for tick in ticks])
    return axes.imshow(values, aspect="auto", interpolation="nearest", cmap="YlOrRd", norm=norm)
