"""Runs, read back from their metrics.jsonl: names, curves, final losses.

A curve is a key over steps, tokens or time. A record without tokens or seconds (an evaluation)
takes those of the record before. null is NaN: it leaves a gap.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from coat_jax.errors import UserError
from coat_jax.printable import counted
from coat_jax.training.config.run import LOGGED
from coat_jax.training.report import metrics

AXES = {"steps": "step", "tokens": "tokens", "time": "seconds"}
SMALL = {"learning_rate": "learning rate", "gradient_norm": "gradient norm"}
OWN_PANELS = 24  # of a config's own metrics, at most
# A panel is at most STRETCH times as high as this share of its values: outliers would flatten them.
SHOWN_QUANTILE, STRETCH = 0.96, 2.5


class Column(NamedTuple):
    """The values of one key, and the records that have them."""

    rows: Int[np.ndarray, " N"]
    values: Float[np.ndarray, " N"]


class Curve(NamedTuple):
    """Points, in the order of the run."""

    x: Float[np.ndarray, " N"]
    y: Float[np.ndarray, " N"]


class RecordedRun(NamedTuple):
    """What a run wrote, by key."""

    name: str
    path: Path
    columns: dict[str, Column]

    def axis(self, over: str) -> Column:
        """The values of an axis over the run.

        Raises:
            UserError: if the run did not write it.
        """
        if AXES[over] not in self.columns:
            raise UserError(f"{self.path} does not record {AXES[over]}: plot it over steps.")
        return self.columns[AXES[over]]

    def curve(self, key: str, over: str) -> Curve:
        """The points of a key; none where the run never wrote it."""
        if key not in self.columns:
            return Curve(np.empty(0), np.empty(0))
        axis, column = self.axis(over), self.columns[key]
        before = np.searchsorted(axis.rows, column.rows, side="right") - 1
        known = before >= 0
        return Curve(axis.values[before[known]], column.values[known])

    def final_loss(self, smooth: int) -> float:
        """The mean training loss of the last records; NaN if one of them is."""
        return float(np.mean(self.columns["loss"].values[-smooth:]))

    def held_out_loss(self) -> float | None:
        """The last held-out loss; None if none was recorded."""
        column = self.columns.get("held_out_loss")
        return None if column is None else float(column.values[-1])


def load(paths: Sequence[Path], names: Sequence[str] = ()) -> list[RecordedRun]:
    """Reads runs, each from its folder or its metrics.jsonl.

    Args:
        paths: the runs.
        names: what to call them; by default their folders' names, with as much of their paths as
            tells them apart.

    Raises:
        UserError: if a path is not a run, a file is damaged or has no losses, or names do not fit
            the runs.
    """
    if names and len(names) != len(paths):
        raise UserError(
            f"{counted(len(names), 'name')} for {counted(len(paths), 'run')}: name all of them, or "
            "none."
        )
    files = [_file(path) for path in paths]
    return [
        RecordedRun(name, file, _columns(file))
        for name, file in zip(names or _names(files), files, strict=True)
    ]


def small_panels(loaded: Sequence[RecordedRun]) -> dict[str, str]:
    """The keys drawn below the losses, with titles; the config's own metrics have their names."""
    own = {key: key for key in own_metrics(loaded)[:OWN_PANELS]}
    recorded = {key for run in loaded for key in run.columns}
    return {key: title for key, title in (SMALL | own).items() if key in recorded}


def own_metrics(loaded: Sequence[RecordedRun]) -> list[str]:
    """The keys that a config added, in the order of the runs."""
    keys = dict.fromkeys(key for run in loaded for key in run.columns)
    return [key for key in keys if key not in LOGGED and "/" not in key]


def smoothed(y: Float[np.ndarray, " N"], window: int) -> Float[np.ndarray, " N"]:
    """The mean of each value and those before it, `window` in all; NaN does not count."""
    if len(y) == 0:
        return y
    finite = np.isfinite(y)
    # The difference of two running sums would be faster, but lose all that follows a huge value.
    total = np.convolve(np.where(finite, y, 0.0), np.ones(window))[: len(y)]
    count = np.convolve(finite, np.ones(window))[: len(y)]
    return np.divide(total, count, out=np.full(len(y), np.nan), where=count > 0)


def _file(path: Path) -> Path:
    file = path / metrics.FILE if path.is_dir() else path
    if not path.exists():
        raise UserError(f"{path} does not exist.")
    if not file.is_file():
        raise UserError(f"{path} has no {metrics.FILE}: is it the folder of a run?")
    return file


def _columns(file: Path) -> dict[str, Column]:
    rows: dict[str, list[int]] = defaultdict(list)
    values: dict[str, list[float]] = defaultdict(list)
    for row, record in enumerate(metrics.read(file)):
        for key, value in record.items():
            if value is None or isinstance(value, int | float):
                rows[key].append(row)
                values[key].append(math.nan if value is None else _number(value))
    if "loss" not in rows:
        hint = "." if rows else " yet. Is it the metrics.jsonl of a run?"
        raise UserError(f"{file} has no losses{hint}")
    return {key: Column(np.array(rows[key]), np.array(values[key], float)) for key in rows}


def _number(value: int | float) -> float:
    """A number as a float; JSON's may be larger than any float."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _names(files: Sequence[Path]) -> list[str]:
    folders = [file.resolve().parent.parts for file in files]
    if len(set(folders)) < len(folders):
        raise UserError("A run is given twice.")
    for count in range(1, max(map(len, folders)) + 1):
        names = ["/".join(parts[-count:]) for parts in folders]
        if len(set(names)) == len(names):
            break
    return names
