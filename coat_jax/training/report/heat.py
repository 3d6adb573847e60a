"""A heat map of a statistic of a run's telemetry.

    left     the last record: a row for each tensor of a layer, a column for each layer
    right    all records: the same rows, and tensors outside layers; the maximum over layers

Shares are on a logarithmic scale. Zero has the palest colour; NaN and infinity are blank.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from coat_jax.errors import UserError
from coat_jax.printable import printable
from coat_jax.training.report import runs
from coat_jax.training.report.chart import styled_figure
from coat_jax.training.report.output import save_figure
from coat_jax.training.report.runs import RecordedRun
from coat_jax.training.report.telemetry import PREFIX
from coat_jax.training.report.titles import TITLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHARES = ("underflow", "subnormal", "saturated", "zero", "floor")
TICKS = 6
SMALLEST = 1e-6  # share that has a colour of its own
LONGEST = 80  # characters of a tensor's name
IN_LAYER = re.compile(r"^(?:.*/)?layers/([0-9]{1,4})/(.+)$")  # a Config has up to 10,000 layers


class Maps(NamedTuple):
    """The numbers of both panels; NaN where a tensor has none.

    Attributes:
        tensors: names of the rows, first those of layers.
        layers: the last record, a row for each of these tensors, a column for each layer.
        steps: of the records.
        over_steps: a row for each tensor, a column for each record.
    """

    tensors: list[str]
    layers: Float[np.ndarray, "rows layers"]
    steps: Float[np.ndarray, " records"]
    over_steps: Float[np.ndarray, "rows records"]


def draw(path: Path, out: Path, *, statistic: str) -> None:
    """Writes a picture to `out`.

    Args:
        path: the folder of a run.
        out: a file that ends in .png.
        statistic: one of `titles.TITLES`.

    Raises:
        UserError: if the path is not a run, or has no telemetry.
    """
    if out.suffix.lower() != ".png":
        raise UserError(f"{out} does not end in .png.")
    (run,) = runs.load([path])
    maps = maps_of(run, statistic)
    _picture(run, maps, out, statistic)


def maps_of(run: RecordedRun, statistic: str) -> Maps:
    """The numbers of a statistic, arranged."""
    curves = {}
    for key in run.columns:
        tensor, _, ending = key.removeprefix(PREFIX).rpartition("/")
        if key.startswith(PREFIX) and ending == statistic:
            curves[tensor] = run.curve(key, "steps")
    if not curves:
        raise UserError(
            f"{run.path} has no records of {statistic}: they are written when a run in FP8 trains "
            "with --telemetry.every, 100 for instance."
        )
    rows: dict[str, dict[int, str]] = {}
    outside = []
    for tensor in curves:
        if match := IN_LAYER.match(tensor):
            rows.setdefault(match[2], {})[int(match[1])] = tensor
        else:
            outside.append(tensor)
    steps = np.unique(np.concatenate([curve.x for curve in curves.values()]))

    def series(tensor: str) -> Float[np.ndarray, " records"]:
        values = np.full(len(steps), np.nan)
        values[np.searchsorted(steps, curves[tensor].x)] = curves[tensor].y
        return values

    count = 1 + max((layer for row in rows.values() for layer in row), default=-1)
    layers = np.full((len(rows), count), np.nan)
    over_steps = np.full((len(rows) + len(outside), len(steps)), np.nan)
    for place, row in enumerate(rows.values()):
        of_row = {layer: series(tensor) for layer, tensor in row.items()}
        for layer, values in of_row.items():
            layers[place, layer] = values[-1]
            over_steps[place] = np.fmax(over_steps[place], values)
    for place, tensor in enumerate(outside, start=len(rows)):
        over_steps[place] = series(tensor)
    return Maps([*rows, *outside], layers, steps, over_steps)


def _picture(run: RecordedRun, maps: Maps, out: Path, statistic: str) -> None:
    rows, count = maps.layers.shape
    colours = _colours(maps, statistic)
    widths = [1 + count, 1 + len(maps.steps)] if rows else [1]
    size = (12, 2 + 0.2 * len(maps.tensors))
    with styled_figure(size, {"axes.grid": False, "font.size": 8}) as figure:
        ratios = [min(max(width / sum(widths), 0.3), 0.7) for width in widths]
        panels = figure.subplots(1, len(widths), squeeze=False, width_ratios=ratios)[0]
        if rows:
            _map(panels[0], maps.layers, maps.tensors[:rows], colours)
            panels[0].set_xticks(_some(count))
            panels[0].set_xlabel("layer")
            panels[0].set_title(f"step {maps.steps[-1]:,.0f}")
        drawn = _map(panels[-1], maps.over_steps, maps.tensors, colours)
        places = _some(len(maps.steps))
        panels[-1].set_xticks(places, [f"{maps.steps[place]:,.0f}" for place in places])
        panels[-1].set_xlabel("step")
        panels[-1].set_title("all records, the largest over layers")
        figure.colorbar(drawn, ax=list(panels), shrink=0.8)
        title = figure.suptitle("", x=0.01, ha="left")
        title.set_parse_math(False)  # a folder's name may have a $
        title.set_text(f"{TITLES[statistic]}: {run.name}")
        save_figure(figure, out)


def _some(columns: int) -> Int[np.ndarray, " ticks"]:
    """The columns that have a label."""
    return np.unique(np.linspace(0, columns - 1, TICKS).astype(int))


def _colours(maps: Maps, statistic: str) -> Mapping[str, Any]:
    """How numbers become colours, alike in both panels."""
    from matplotlib.colors import LogNorm, Normalize

    shown = np.concatenate([maps.layers.ravel(), maps.over_steps.ravel()])
    shown = shown[np.isfinite(shown)]
    if statistic in SHARES:
        return {"norm": LogNorm(SMALLEST, 1.0, clip=True)}
    low, high = (shown.min(), shown.max()) if len(shown) else (0.0, 1.0)
    return {"norm": Normalize(min(low, 0.0), max(high, low + 1e-9))}


def _map(
    axes: "Axes", values: Float[np.ndarray, "rows columns"], names: list[str], colours: Any
) -> Any:
    drawn = axes.imshow(
        np.where(values == 0, SMALLEST, values),  # a logarithm has no zero
        aspect="auto",
        interpolation="nearest",
        cmap="YlOrRd",
        **colours,
    )
    labels = [printable(name if len(name) <= LONGEST else f"{name[:LONGEST]}...") for name in names]
    axes.set_yticks(range(len(names)), labels, parse_math=False)  # a name may have a $
    return drawn
