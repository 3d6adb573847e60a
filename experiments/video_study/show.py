"""Tables and pictures of the study: held-out losses by time, and videos that networks made."""

import base64
import io
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from experiments import records
from experiments.drawn_videos import TIMES
from experiments.row_files import Row
from experiments.study import tables
from experiments.study.statistics import Comparison, compare
from experiments.video_study.arms import BASELINES


def with_afterwards(rows: list[Row]) -> list[Row]:
    """The rows, and one more for each way in which a network was evaluated after training."""
    found = list(rows)
    for row in rows:
        for way in row["held_out"].keys() - {"own"}:
            arm, losses = f"bf16, then {way}", {"own": row["held_out"][way]}
            if row["arm"] == BASELINES[0]:
                found.append(row | {"arm": arm, "held_out": losses})
    return found


def costs(rows: list[Row]) -> dict[str, Comparison]:
    """What each arm costs in held-out loss: at all times together, and at each of TIMES."""

    def at(time: int | None) -> Comparison:
        def loss(row: Row) -> float:
            losses = row["held_out"]["own"]
            return float(np.mean(losses) if time is None else losses[time])

        return compare(with_afterwards(rows), BASELINES, loss)

    return {"all times": at(None)} | {f"{time}": at(i) for i, time in enumerate(TIMES)}


def show(rows: list[Row], folder: Path | None) -> None:
    """Prints a table for each size and settings, and draws it into a folder."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[f"{row['size']}, {row['settings']}"].append(row)
    for name, group in groups.items():
        found = costs(group)
        if not found["all times"].effects:
            print(f"{name}: a baseline and another arm of its seed are needed to compare.")
            continue
        noise = found["all times"].noise.apart
        cells = [["held-out loss above BF16", "seeds", *found]]
        for arm, effect in found["all times"].effects.items():
            by_time = (str(of_time.effects[arm]) for of_time in found.values())
            cells.append([arm, str(effect.seeds), *by_time])
        tables.show(name, cells, f"Two BF16 runs of a seed are {100 * noise:.2g} % apart.")
        if folder is not None:
            path = folder / f"video_study_{group[0]['size'].lower()}.png"
            draw(group, path)
            print(path)


def draw(rows: list[Row], path: Path) -> None:
    """Draws the costs by time, and beside them frames of the videos that networks made."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from PIL import Image

    found = costs(rows)
    sheets: dict[str, Any] = {}
    for row in rows:
        for way, sheet in row["samples"].items():
            name = row["arm"] if way == "own" else f"{row['arm']}, then {way}"
            if row["arm"] != BASELINES[1]:
                sheets[name] = Image.open(io.BytesIO(base64.b64decode(sheet)))
    columns = 1 + (len(sheets) + 1) // 2
    with plt.rc_context(records.CHART):
        figure = plt.figure(figsize=(5 + 2.2 * (columns - 1), 4.6))
        grid = figure.add_gridspec(2, columns, width_ratios=[2.4] + [1] * (columns - 1))
        axes = figure.add_subplot(grid[:, 0])
        for number, arm in enumerate(found["all times"].effects):
            line = [100 * found[f"{time}"].effects[arm].mean for time in TIMES]
            dash = "--" if "then" in arm else "-"
            color = records.LINES[number % len(records.LINES)]
            axes.plot(TIMES, line, dash, color=color, marker="o", ms=3, label=arm)
        axes.axhline(0, color=records.INK, lw=0.8)
        axes.set_xlabel("time: 0 is a video, 1 is noise")
        axes.set_ylabel("held-out loss above BF16, %")
        axes.legend(fontsize=8)
        for place, (name, sheet) in enumerate(sheets.items()):
            own = figure.add_subplot(grid[place % 2, 1 + place // 2])
            own.imshow(sheet)
            own.set_axis_off()
            own.set_title(name, fontsize=8)
        figure.savefig(path)
        plt.close(figure)
