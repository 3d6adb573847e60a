"""Tables and pictures of `after_training`."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from experiments import records
from experiments.after_training.changes import What, costs, excesses, measured
from experiments.loss_study.results import conditions_of
from experiments.loss_study.statistics import Effect
from experiments.loss_study.table import percent
from experiments.row_files import Row, digest

FILE = "after_training.json"
CAPTION = (
    "± is half of a 95 % interval from the differences over seeds, whose number is in brackets. "
    "'After steps in X': above the loss in BF16 after as many steps in BF16."
)


def show(rows: list[Row], folder: Path) -> None:
    """Prints two tables for each of the conditions, and draws the results into `folder`."""
    if not rows:
        print("There are no results yet. Name a --size to measure some.")
        return
    console = Console(width=140)
    folder.mkdir(parents=True, exist_ok=True)
    for conditions, group in conditions_of(rows).items():
        kinds = measured(group)
        of_arms = costs(group)
        table = _table(f"Held-out loss above BF16\n{conditions}", kinds, of_arms, with_p=False)
        table.caption = CAPTION
        console.print(table, highlight=False)
        if of_excess := excesses(group):
            title = "The same, above that of networks trained in BF16"
            console.print(_table(title, kinds, of_excess, with_p=True), highlight=False)
        first = group[0]
        which = digest([first["settings"], first["text"]])[:4]
        path = folder / f"after_training_{first['size'].lower()}_{which}.png"
        _draw(conditions, kinds, of_arms, path)
        print(path)


def _table(
    title: str, kinds: list[What], found: Mapping[str, Mapping[What, Effect]], *, with_p: bool
) -> Table:
    """A row for each thing that was measured, and columns for each arm."""
    table = Table(title=title, caption_justify="left")
    table.add_column("")
    for arm, effects in found.items():
        seeds = max(effect.seeds for effect in effects.values())
        table.add_column(f"{arm} ({seeds})", justify="right")
        if with_p:
            table.add_column("Holm p", justify="right")
    for what in kinds:
        cells = [str(what)]
        for effects in found.values():
            effect = effects[what]
            width = "?" if math.isnan(effect.half) else f"{100 * effect.half:.3f}"
            cells.append(f"{percent(effect.mean)} ± {width}")
            if with_p:
                cells.append("?" if math.isnan(effect.holm) else f"{effect.holm:.2g}")
        table.add_row(*cells)
    return table


def _draw(
    conditions: str, kinds: list[What], found: Mapping[str, Mapping[What, Effect]], path: Path
) -> None:
    """A panel for each format, with every recipe's cost by the arm that was trained."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    formats: dict[str, list[What]] = {}
    for what in kinds:
        if what.recipe != "bf16":
            formats.setdefault(what.recipe.split()[0], []).append(what)
    most = max(map(len, formats.values()))
    with plt.rc_context(records.CHART | {"axes.grid.axis": "both"}):
        figure, panels = plt.subplots(
            1, len(formats), figsize=(6.5 * len(formats), 0.36 * most + 1.6), squeeze=False
        )
        for panel, (name, of_format) in zip(panels[0], formats.items(), strict=True):
            for number, (arm, effects) in enumerate(found.items()):
                _points(panel, number, arm, [effects[what] for what in of_format], len(found))
            labels = [str(what).removeprefix(f"{name} ") for what in of_format]
            panel.set_yticks(range(len(labels)), labels)
            panel.invert_yaxis()
            panel.axvline(0, color=records.INK, lw=0.8)
            panel.set_xlabel("% more held-out loss than in BF16, 95 % intervals")
            panel.set_title(name.upper())
        panels[0][-1].legend(
            title="trained as", loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8
        )
        figure.suptitle(f"Quantized after training\n{conditions}", fontsize=11)
        figure.savefig(path)
        plt.close(figure)


def _points(panel: Any, number: int, arm: str, effects: list[Effect], arms: int) -> None:
    """An arm's effects, each with its interval, beside those of other arms."""
    colors = records.LINES
    panel.errorbar(
        [100 * effect.mean for effect in effects],
        np.arange(len(effects)) + 0.6 * (number - (arms - 1) / 2) / arms,
        xerr=[0.0 if math.isnan(effect.half) else 100 * effect.half for effect in effects],
        fmt="o",
        ms=4,
        lw=1.4,
        color=colors[number % len(colors)],
        label=arm,
    )
