"""The style of all charts: `with picture(out, (9, 6)) as figure: ...` writes out when it ends."""

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coat_jax import writing
from coat_jax.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


@contextlib.contextmanager
def picture(out: Path, size: tuple[float, float], **style: Any) -> Iterator["Figure"]:
    """An empty figure of a size in inches; an earlier picture stays until it is complete."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    if out.suffix.lower() != ".png":
        raise UserError(f"{out} does not end in .png.")
    content = io.BytesIO()
    # Names of runs and metrics may have a $, which would begin a formula.
    with mpl.rc_context(CHART | {"text.parse_math": False} | style):
        figure = Figure(figsize=size)  # not pyplot's: no window, no global backend
        yield figure
        figure.savefig(content, format="png")
    with writing.full_disk(out.parent, out.name):
        writing.replace(out, content.getvalue())
