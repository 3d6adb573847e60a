"""Loss curves as one self-contained HTML file: no network, no scripts but its own.

page.html beside this file is the page without data. The data go in as JSON that can neither end
the script element that holds them nor be run; the page shows names as text, never as markup.
Long runs are thinned: each point is the mean of so many records that a curve has at most POINTS
points.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from coat_jax.errors import UserError
from coat_jax.files import is_regular, path_failures
from coat_jax.training.report.chart import Look
from coat_jax.training.report.output import save
from coat_jax.training.report.runs import (
    AXES,
    SHOWN_QUANTILE,
    STRETCH,
    Curve,
    RecordedRun,
    small_panels,
    smoothed,
)

POINTS = 2000  # of a curve, at most
DASHES = {"-": "none", "--": "7 5", ":": "1 5", "-.": "9 5 1 5"}
LOSSES = ("loss", "held_out_loss")
TEMPLATE = Path(__file__).with_name("page.html")
PLACE = "{{data}}"
TITLE = b"<title>Loss curves</title>"  # by which an earlier page is recognized
HEAD = 1000  # bytes of a page, which contain its title


def write(
    loaded: Sequence[RecordedRun], looks: Sequence[Look], out: Path, *, over: str, smooth: int
) -> None:
    """Writes the page; `over` and `smooth` are the initial settings of its controls."""
    longest = max(len(run.columns["loss"].rows) for run in loaded)
    thin = -(-longest // POINTS)
    small = small_panels(loaded)
    keys = (*LOSSES, *small)
    data = {
        "over": over,
        "shown": SHOWN_QUANTILE,
        "stretch": STRETCH,
        "thin": thin,
        "smooth": max(round(smooth / thin), 1),
        "small": [{"key": key, "title": title} for key, title in small.items()],
        "runs": [_run(r, look, keys, thin, smooth) for r, look in zip(loaded, looks, strict=True)],
    }
    template = TEMPLATE.read_text("utf-8")
    save(template.replace(PLACE, _embedded(data)), out)


def require_replaceable(path: Path) -> None:
    """Raises if there is something else than an earlier page, which writing would replace."""
    if os.path.lexists(path) and not _is_page(path):
        raise UserError(
            f"{path} is not a page that `coat plot` wrote, so it is not replaced: choose another "
            "name with --out, or move it away."
        )


def _is_page(path: Path) -> bool:
    if not is_regular(path):
        return False
    with path_failures(path), path.open("rb") as file:
        return TITLE in file.read(HEAD)


def _run(
    run: RecordedRun, look: Look, keys: Sequence[str], thin: int, smooth: int
) -> dict[str, Any]:
    """What the page draws of a run: the y of each curve, and its x on each available axis."""
    axes = [over for over, key in AXES.items() if key in run.columns]
    curves: dict[str, Any] = {}
    for key in keys:
        if key not in run.columns:
            continue
        step = 1 if key == "held_out_loss" else thin
        thinned = {over: _thinned(run.curve(key, over), step) for over in axes}
        curves[key] = {over: _numbers(curve.x) for over, curve in thinned.items()}
        curves[key]["y"] = _numbers(thinned["steps"].y)
    final = {"loss": _numbers([run.final_loss(smooth)])[0], "held_out_loss": None}
    if (held_out := run.held_out_loss()) is not None:
        final["held_out_loss"] = _numbers([held_out])[0]
    drawn = {"color": look.color, "width": look.width, "dashes": DASHES[look.style]}
    return {"name": run.name, "curves": curves, "final": final, **drawn}


def _thinned(curve: Curve, every: int) -> Curve:
    """The mean of every `every` points, placed at the last of them."""
    last = np.minimum(np.arange(every - 1, len(curve.x) + every - 1, every), len(curve.x) - 1)
    return Curve(curve.x[last], smoothed(curve.y, every)[last])


def _numbers(values: Float[np.ndarray, " N"] | Sequence[float]) -> list[float | None]:
    """Numbers for JSON, rounded to six digits, which suffice for a screen; null for NaN."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values]


def _embedded(data: dict[str, Any]) -> str:
    """JSON that HTML cannot take for markup."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")
