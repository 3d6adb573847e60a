"""A map of a statistic of telemetry over the steps of a run: a row for each tensor.

Layers share a row, which has the largest of their numbers and names the layer whose last number is
the largest. Shares are on a logarithmic scale. Zero has the palest colour; NaN is blank.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from jaxtyping import Float

from coat_jax.errors import UserError
from coat_jax.printable import printable
from coat_jax.training.report.telemetry import PREFIX

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHARES = ("underflow", "subnormal", "saturated", "zero", "floor")
SMALLEST = 1e-6  # share that has a colour of its own
IN_LAYER = re.compile(r"(?:.*/)?layers/(\d+)/(.+)")
Curve: TypeAlias = Float[np.ndarray, "2 N"]
Tensors: TypeAlias = Mapping[str, Mapping[str, Curve]]  # by name, and by layer


def by_tensor(name: str, curves: Mapping[str, Curve], statistic: str) -> Tensors:
    """The curves of a statistic of telemetry, for each tensor of the run of this name."""
    found: dict[str, dict[str, Curve]] = defaultdict(dict)
    for key, curve in curves.items():
        if key.startswith(PREFIX) and key.endswith(f"/{statistic}"):
            tensor = key.removeprefix(PREFIX).removesuffix(f"/{statistic}")
            in_layer = IN_LAYER.fullmatch(tensor)
            layer, tensor = in_layer.groups() if in_layer else ("", tensor)
            found[tensor][layer] = curve
    if not found:
        raise UserError(
            f"{name} has no records of {statistic}: they are written when a run in FP8 trains "
            "with --telemetry.every, 100 for instance."
        )
    return found


def draw_map(axes: "Axes", statistic: str, tensors: Tensors, size: float) -> None:
    """Draws the map of a statistic, with `size` of what records count by as a unit."""
    from matplotlib.colors import LogNorm, Normalize

    places = np.unique([x for curves in tensors.values() for x in np.hstack([*curves.values()])[0]])
    values = np.full((len(tensors), len(places)), np.nan)
    labels = []
    for row, (tensor, curves) in zip(values, tensors.items(), strict=True):
        for x, y in curves.values():
            at = np.searchsorted(places, x)
            row[at] = np.fmax(row[at], y)
        last = {layer: y[-1] for layer, (_, y) in curves.items()}
        worst = max(last, key=lambda layer: np.nan_to_num(last[layer], nan=-np.inf))
        labels.append(printable(f"{tensor}, layer {worst}" if worst else tensor))
    highest = np.max(values, initial=0.0, where=np.isfinite(values)) or 1.0
    norm = LogNorm(SMALLEST, 1.0, clip=True) if statistic in SHARES else Normalize(0.0, highest)
    values[values == 0] = SMALLEST  # a logarithm has no zero
    # A record stands for the steps since the one before it.
    edges, rows = np.concatenate([[0.0], places]) / size, np.arange(len(tensors) + 1)
    colors = axes.pcolormesh(edges, rows, values, cmap="YlOrRd", norm=norm)
    colors.sticky_edges.x.clear()  # so that points at the end of curves are not cut off
    axes.set_yticks(rows[:-1] + 0.5, labels, fontsize=7)
    axes.invert_yaxis()
    axes.grid(False)
    axes.set_title(f"{statistic}, the maximum over layers (named: that of the last record)")
    axes.figure.colorbar(colors, ax=axes, location="bottom", aspect=60, format="%g")
