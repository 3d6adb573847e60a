"""The style of all charts: `with styled_figure((9, 6)) as figure: ...`."""

import contextlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, PALE, ACCENT = "#1f2933", "#b8c1cc", "#d9482b"  # text, the baseline, other runs
LINES = (ACCENT, "#2b6cb0", "#2f855a", "#b7791f", "#7b4bb7", "#0f8b8d", "#c2417f", "#8a5a44")
CHART: dict[Any, Any] = {
    "figure.dpi": 160,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.w_pad": 0.15,  # inches
    "figure.constrained_layout.h_pad": 0.12,
    "figure.titlesize": 13,
    "figure.titleweight": "bold",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": PALE,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#e8ecf0",
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
}


@contextlib.contextmanager
def styled_figure(
    size: tuple[float, float], style: Mapping[Any, Any] = MappingProxyType({})
) -> Iterator["Figure"]:
    """An empty figure in the style of all charts, without pyplot: no window, no global backend.

    Args:
        size: its width and height, in inches.
        style: settings of matplotlib that replace those of CHART.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context({**CHART, **style}):
        figure = Figure(figsize=size)
        FigureCanvasAgg(figure)
        yield figure


class Look(NamedTuple):
    """How a curve is drawn; the style is matplotlib's."""

    color: str
    width: float
    style: str


def looks_of(count: int) -> list[Look]:
    """One curve in the accent's colour; of several, the first pale and wide below the others."""
    styles = ("-", "--", ":", "-.")
    lines = [
        Look(LINES[i % len(LINES)], 1.5, styles[i // len(LINES) % len(styles)])
        for i in range(count)
    ]
    return lines if count == 1 else [Look(PALE, 5.0, "-"), *lines[:-1]]
