"""Tables and pictures of `fine_tuning`: those of the loss study, of runs that only tune."""

import dataclasses
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.fine_tuning import parts
from experiments.loss_study import results, table
from experiments.loss_study.arm import Settings
from experiments.loss_study.statistics import Cost, cost_of
from experiments.row_files import Row, digest

FILE = "fine_tuning.json"


def show(rows: list[Row], folder: Path) -> None:
    """Prints what each way of tuning costs, and draws it into `folder`."""
    for size in dict.fromkeys(row["size"] for row in rows):
        gained = 100 * gain([row for row in rows if row["size"] == size])
        print(f"{size}: tuning in BF16 lowers the held-out loss of prose by {gained:.2f} %.")
    runs = [of_way for row in rows for of_way in ways_of(row)]
    table.show(runs, folder, name="fine_tuning", title="Tuned on other text: loss above BF16")
    if any("forward" in row for row in rows):
        Console(width=140).print(_forwards(rows), highlight=False)


def _forwards(rows: list[Row]) -> Table:
    """The cost of rounding some operands in the forward pass, before the network is tuned."""
    found = {name: forward(rows, name) for name in parts.OPERANDS}
    seeds = sum("forward" in row for row in rows)
    shown = Table(title=f"Before tuning, held out, with operands rounded: {seeds} seeds")
    shown.add_column("in the products of")
    for name in found:
        shown.add_column(f"{name} rounded", justify="right")
    for place in parts.PLACES:
        shown.add_row(place, *(str(found[name][place]) for name in parts.OPERANDS))
    return shown


def forward(rows: list[Row], name: str) -> dict[str, Cost]:
    """What it costs to round an operand in the products of each place."""
    rows = [row for row in rows if "forward" in row]

    def cost(place: str) -> Cost:
        rounded = [np.mean(row["forward"][name][place]) for row in rows]
        exact = [np.mean(row["before"]["bf16"]) for row in rows]
        return cost_of((np.log(rounded) - np.log(exact)).tolist())

    return {place: cost(place) for place in parts.PLACES}


def gain(rows: list[Row]) -> float:
    """By how much tuning in BF16 lowers the held-out loss, relative to it; the mean over runs."""
    before = [np.mean(row["before"]["bf16"]) for row in rows]
    after = [np.mean(row["tuned"]["bf16"]["held_out"]["bf16"]) for row in rows]
    return float(np.mean(np.log(before) - np.log(after)))


def ways_of(row: Row) -> list[Row]:
    """A row for each way of tuning, as the loss study would have of a run."""
    of_run = row["definition"]["tuned"]
    before = Settings(**row["settings"])
    settings = dataclasses.replace(
        before,
        steps=of_run["steps"],
        learning_rate=of_run["rate"] * before.learning_rate,
    )
    return [
        row
        | {
            "arm": name,
            "network": row["key"],
            "definition": results.completed(of_run["ways"][name], row["code"]),
            # After another training runs cannot be compared.
            "text": digest([row["text"], row["settings"]]),
            "settings": dataclasses.asdict(settings),
            "losses": tuned["losses"],
            "held_out": tuned["held_out"],
        }
        for name, tuned in row["tuned"].items()
    ]
