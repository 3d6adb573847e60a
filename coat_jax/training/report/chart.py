"""The style of all charts: `with matplotlib.rc_context(CHART): ...`."""

from typing import Any

INK, PALE, ACCENT = "#1f2933", "#b8c1cc", "#d9482b"  # text, the baseline, other runs
LINES = (ACCENT, "#2b6cb0", "#2f855a", "#b7791f", "#7b4bb7", "#0f8b8d", "#c2417f", "#8a5a44")
CHART: dict[Any, Any] = {
    "figure.dpi": 160,
    "figure.constrained_layout.use": True,
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
