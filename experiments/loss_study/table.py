"""Prints what `loss_study` has measured, under each of the conditions, and draws it."""

import math
from collections import defaultdict
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.loss_study import plot
from experiments.loss_study.results import baselines_of, conditions_of
from experiments.loss_study.statistics import Comparison, Effect, compare, held_out, start_of
from experiments.row_files import Row


def show(rows: list[Row], folder: Path, **pictures: str) -> None:
    """Prints a table for each of the conditions, and draws the results into `folder`.

    Args:
        rows: of all conditions.
        folder: for the pictures.
        pictures: their names and titles, see `plot.draw`.
    """
    if not rows:
        print("There are no results yet. Name a --size to measure some.")
        return
    console = Console(width=140)
    for conditions, group in conditions_of(rows).items():
        baselines = baselines_of(group)
        if not baselines:
            print(f"{conditions}: no baseline yet, so nothing to compare with.")
            continue
        if len({row["arm"] for row in group}) == 1:
            print(f"{conditions}: one arm only, so nothing to compare with.")
            continue
        console.print(_table(conditions, group, baselines), highlight=False)
        console.print(_crossed(group, baselines), highlight=False)
    folder.mkdir(parents=True, exist_ok=True)
    for path in plot.draw(rows, folder, **pictures):
        print(path)


def _table(conditions: str, rows: list[Row], baselines: set[str]) -> Table:
    """The effect of each arm on the final training loss and on the held-out loss."""
    training, held = compare(rows, baselines), compare(rows, baselines, held_out("own"))
    table = Table(title=conditions, caption=_caption(training, held), caption_justify="left")
    columns = ("", "seeds", "training, last 10 %", "in a run", "Holm p")
    for column in (*columns, "held out", "Holm p"):
        table.add_column(column, justify="left" if not column else "right")
    for arm in sorted(training.effects, key=lambda arm: training.effects[arm].mean):
        table.add_row(arm, *_cells(training.effects[arm], held.effects[arm]))
    table.add_section()
    alike = [row for row in rows if row["arm"] in baselines]
    for arm in sorted(baselines):
        others = baselines - {arm}
        against = compare(alike, others), compare(alike, others, held_out("own"))
        if arm in against[0].effects:
            cells = _cells(*(comparison.effects[arm] for comparison in against))
            table.add_row(f"{arm} (baseline)", *cells)
    return table


def _cells(training: Effect, held: Effect) -> list[str]:
    return [
        str(training.seeds),
        f"{percent(training.mean)} ± {_width(training.half)}",
        f"± {_width(training.within)}",
        _p(training.holm),
        f"{percent(held.mean)} ± {_width(held.half)}",
        _p(held.holm),
    ]


def _caption(training: Comparison, held: Comparison) -> str:
    """The noise, in words."""
    noise = training.noise
    seeds = max((effect.seeds for effect in training.effects.values()), default=0)
    lines = [
        "± is half of a 95 % interval from the differences over seeds; 'in a run': the standard "
        "error over 8 blocks of steps. A baseline is compared with the other baselines.",
    ]
    if noise.floor_freedom:
        lines.append(
            f"Noise floor: baselines of one seed differ by {_width(noise.apart)} "
            f"(held out {_width(held.noise.apart)}), standard deviation of two "
            f"runs, {noise.floor_freedom} degrees of freedom. Rounding alone explains a mean over "
            f"{seeds} seeds within ± {_width(noise.band(seeds, training.baselines))} (held out "
            f"± {_width(held.noise.band(seeds, held.baselines))})."
        )
    else:
        lines.append("Noise floor: unknown, no seed has two baselines.")
    return "\n".join(lines)


def _crossed(rows: list[Row], baselines: set[str]) -> Table:
    """Cross-evaluation: what the forward pass costs, and what training lost.

    Several runs of one seed count as their mean, as in the other table.
    """
    table = Table(title="Held out, against the baselines evaluated in BF16")
    for column in ("weights of", "evaluated in BF16", "in COAT_PAPER", "in its own precision"):
        table.add_column(column, justify="left" if column == "weights of" else "right")
    forwards = ("bf16", "coat", "own")
    gaps: dict[str, dict[int, list[list[float]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        base = [
            held_out("bf16")(other)
            for other in rows
            if other["arm"] in baselines and start_of(other) == start_of(row)
        ]
        if base:
            reference = sum(map(math.log, base)) / len(base)
            arm = "baselines" if row["arm"] in baselines else row["arm"]
            gaps[arm][row["seed"]].append(
                [math.log(held_out(forward)(row)) - reference for forward in forwards]
            )
    for arm, by_seed in gaps.items():
        means = np.mean([np.mean(of_seed, axis=0) for of_seed in by_seed.values()], axis=0)
        table.add_row(arm, *map(percent, means))
    return table


def percent(value: float) -> str:
    """A relative difference with its sign."""
    return f"{100 * value:+.3f} %"


def _width(value: float) -> str:
    return "?" if math.isnan(value) else f"{100 * value:.3f}"


def _p(value: float) -> str:
    return "?" if math.isnan(value) else f"{value:.2g}"
