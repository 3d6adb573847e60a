"""The pictures of `loss_study`: every arm with its interval, and the gap against tokens."""

import math
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from experiments import records
from experiments.loss_study.results import baselines_of, conditions_of, trains_by_muon
from experiments.loss_study.statistics import compare, gap, held_out
from experiments.row_files import Row, digest

TITLE = "Loss above BF16 with FP32 moments"
SMOOTH = 0.05  # the share of a run that a point of the gap is the mean of
SKIPPED = 0.1  # the share of a run at its start that is not drawn: the loss falls too fast


def draw(rows: list[Row], folder: Path, name: str = "loss_study", title: str = TITLE) -> list[Path]:
    """Draws each of the conditions that has a baseline and an arm; returns the files.

    Their names begin with `name`. Arms of earlier code are left out where the same arm was measured
    again.
    """
    paths = []
    for conditions, found in conditions_of(rows).items():
        baselines = baselines_of(found)
        group = [row for row in found if row["arm"] in baselines or "@" not in row["arm"]]
        if baselines and {row["arm"] for row in group} - baselines:
            path = folder / f"{name}_{_conditions(group[0])}.png"
            _draw(f"{title}\n{conditions}", group, baselines, path)
            paths.append(path)
    return paths


def _conditions(row: Row) -> str:
    """The end of a file name, unique to these conditions."""
    which = digest([row["settings"], row["text"], row["definition"]["optimizer"]])
    optimizer = "_muon" if trains_by_muon(row) else ""
    return f"{row['size'].lower()}_{which[:4]}{optimizer}"


def _draw(title: str, rows: list[Row], baselines: set[str], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    training = compare(rows, baselines)
    arms = sorted(training.effects, key=lambda arm: -training.effects[arm].mean)
    with plt.rc_context(records.CHART | {"axes.grid.axis": "both"}):
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(13, max(0.42 * len(arms) + 2.0, 4.0)), width_ratios=(1, 1.2)
        )
        _effects(left, rows, baselines, arms)
        _gaps(right, rows, baselines, arms)
        figure.suptitle(title, fontsize=11)
        figure.savefig(path)
        plt.close(figure)


def _effects(axes: Any, rows: list[Row], baselines: set[str], arms: list[str]) -> None:
    """Every arm with its interval, over the band that rounding alone explains."""
    looks = (
        ("training, last 10 %", compare(rows, baselines), records.ACCENT, 0.12),
        ("held out", compare(rows, baselines, held_out("own")), records.INK, -0.12),
    )
    for label, comparison, color, shift in looks:
        effects = [comparison.effects[arm] for arm in arms]
        halves = [0.0 if math.isnan(effect.half) else 100 * effect.half for effect in effects]
        axes.errorbar(
            [100 * effect.mean for effect in effects],
            np.arange(len(arms)) + shift,
            xerr=halves,
            fmt="o",
            ms=4,
            lw=1.4,
            color=color,
            label=label,
        )
    training = looks[0][1]
    seeds = max(effect.seeds for effect in training.effects.values())
    band = 100 * training.noise.band(seeds, training.baselines)
    if not math.isnan(band):
        axes.axvspan(-band, band, color=records.PALE, alpha=0.4, lw=0, label="rounding alone")
    axes.axvline(0, color=records.INK, lw=0.8)
    names = [f"{arm} ({training.effects[arm].seeds})" for arm in arms]
    axes.set_yticks(range(len(arms)), names)
    axes.set_ylim(-0.7, len(arms) - 0.3)
    axes.set_xlabel("% above the baselines, 95 % intervals")
    axes.set_title("arms (seeds)")
    axes.legend(loc="upper right", fontsize=8)


def _gaps(axes: Any, rows: list[Row], baselines: set[str], arms: list[str]) -> None:
    """The training loss above the baselines', against tokens; baselines against each other."""
    settings = rows[0]["settings"]
    tokens = settings["batch"] * settings["sequence"] / 1e6
    curves = {arm: gap(rows, arm, baselines) for arm in [*sorted(baselines), *arms]}
    colors = records.LINES
    for number, (arm, curve) in enumerate(curves.items()):
        if len(curve) == 0:
            continue
        width = max(round(SMOOTH * len(curve)), 1)
        values = 100 * _smooth(curve, width)
        steps = np.arange(len(values)) + width / 2
        shown = steps >= SKIPPED * len(curve)
        is_base = arm in baselines
        axes.plot(
            steps[shown] * tokens,
            values[shown],
            color=records.PALE if is_base else colors[number % len(colors)],
            lw=1.0 if is_base else 1.4,
            label=None if is_base else arm,
        )
    axes.axhline(0, color=records.INK, lw=0.8)
    axes.set_xlabel("million tokens")
    axes.set_title("% above the baselines; pale: a baseline above the others")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8)


def _smooth(curve: Float[np.ndarray, " T"], width: int) -> Float[np.ndarray, " T"]:
    return np.convolve(curve, np.ones(width) / width, "valid")
