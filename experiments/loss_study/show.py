"""Tables and pictures of the loss study, under each of its conditions."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from experiments import records
from experiments.loss_study.conditions import baselines_of, conditions_of, trains_by_muon
from experiments.row_files import Row, digest
from experiments.study import tables
from experiments.study.statistics import Comparison, compare, final, gap, held_out

LOSSES = {
    "training, last 10 %": final,
    "held out": held_out("own"),
    "held out, evaluated in BF16": held_out("bf16"),
}
SMOOTH = 0.05  # the share of a run that a point of the gap is the mean of
SKIPPED = 0.1  # the share of a run at its start that is not drawn: the loss falls too fast


def show(rows: list[Row], folder: Path | None) -> None:
    """Prints a table for each of the conditions, and draws it into a folder."""
    for conditions, group in conditions_of(rows).items():
        baselines = baselines_of(group)
        if not {row["arm"] for row in group} - baselines or not baselines:
            print(f"{conditions}: a baseline and another arm are needed to compare.")
            continue
        found = {label: compare(group, baselines, loss) for label, loss in LOSSES.items()}
        caption = _caption(found["training, last 10 %"])
        tables.show(conditions, table(group, baselines, found), caption)
        if folder is not None:
            path = folder / f"loss_study_{_file_name(group[0])}.png"
            _draw(conditions, group, baselines, path)
            print(path)


def table(rows: list[Row], baselines: set[str], found: dict[str, Comparison]) -> list[list[str]]:
    """The effect of each arm on each loss, and of each baseline against the others."""
    cells = [["", "seeds", *(column for label in LOSSES for column in (label, "Holm p"))]]
    effects = {label: dict(comparison.effects) for label, comparison in found.items()}
    training = next(iter(effects.values()))
    order = sorted(training, key=lambda arm: training[arm].mean)
    alike = [row for row in rows if row["arm"] in baselines]
    for arm in sorted(baselines):
        for label, loss in LOSSES.items():
            against = compare(alike, baselines - {arm}, loss).effects
            if arm in against:
                effects[label][arm] = against[arm]
    for arm in [*order, *(arm for arm in sorted(baselines) if arm in training)]:
        line = [arm if arm in order else f"{arm} (baseline)", str(training[arm].seeds)]
        for by_arm in effects.values():
            p = by_arm[arm].holm
            line += [str(by_arm[arm]), "?" if math.isnan(p) else f"{p:.2g}"]
        cells.append(line)
    return cells


def _caption(training: Comparison) -> str:
    """The noise, in words."""
    noise = training.noise
    lines = [
        "± is half of a 95 % interval from the differences over seeds. A baseline is compared with "
        "the others.",
        "Noise floor: unknown, no seed has two baselines.",
    ]
    if noise.floor_freedom:
        seeds = max(effect.seeds for effect in training.effects.values())
        lines[1] = (
            f"Noise floor: the training losses of two baselines of a seed are "
            f"{100 * noise.apart:.2g} % apart (standard deviation, {noise.floor_freedom} degrees "
            f"of freedom). Rounding alone explains a mean over {seeds} seeds within ± "
            f"{100 * noise.band(seeds, training.baselines):.2g} %."
        )
    return "\n".join(lines)


def _file_name(row: Row) -> str:
    """The end of a file name, unique to the conditions of a row."""
    which = digest([row["settings"], row["text"], row["definition"]["optimizer"]])
    optimizer = "_muon" if trains_by_muon(row) else ""
    return f"{row['size'].lower()}_{which[:4]}{optimizer}"


def _draw(conditions: str, rows: list[Row], baselines: set[str], path: Path) -> None:
    """Draws the training loss above the baselines' against tokens; and these, in a pale colour.

    Arms of earlier versions are left out.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    settings = rows[0]["settings"]
    tokens = settings["batch"] * settings["sequence"] / 1e6
    arms = sorted({row["arm"] for row in rows if "@" not in row["arm"]} - baselines)
    with plt.rc_context(records.CHART | {"axes.grid.axis": "both"}):
        figure, axes = plt.subplots(figsize=(8, 4.5))
        for arm in sorted(baselines):
            _line(axes, gap(rows, arm, baselines), tokens, color=records.PALE, lw=1.0)
        for number, arm in enumerate(arms):
            color = records.LINES[number % len(records.LINES)]
            _line(axes, gap(rows, arm, baselines), tokens, color=color, lw=1.4, label=arm)
        axes.axhline(0, color=records.INK, lw=0.8)
        axes.set_xlabel("million tokens")
        axes.set_ylabel("% above the baselines (pale)")
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8)
        figure.suptitle(f"Training loss above BF16 with FP32 moments\n{conditions}", fontsize=11)
        figure.savefig(path)
        plt.close(figure)


def _line(axes: Any, curve: np.ndarray, tokens: float, **style: Any) -> None:
    """A smooth curve, without its start."""
    if len(curve) == 0:
        return
    width = max(round(SMOOTH * len(curve)), 1)
    values = 100 * np.convolve(curve, np.ones(width) / width, "valid")
    steps = np.arange(len(values)) + width / 2
    shown = steps >= SKIPPED * len(curve)
    axes.plot(steps[shown] * tokens, values[shown], **style)
