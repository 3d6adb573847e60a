"""Tables and pictures of `fine_tuning`: those of the loss study, of runs that only tune."""

import dataclasses
from pathlib import Path

import numpy as np

from experiments.loss_study import table
from experiments.loss_study.arm import Settings
from experiments.row_files import Row, digest

FILE = "fine_tuning.json"


def show(rows: list[Row], folder: Path) -> None:
    """Prints what each way of tuning costs, and draws it into `folder`."""
    if rows:
        print(f"Tuning in BF16 lowers the held-out loss of prose by {100 * gain(rows):.2f} %.")
    runs = [of_way for row in rows for of_way in ways_of(row)]
    table.show(runs, folder, name="fine_tuning", title="Tuned on other text: loss above BF16")


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
            "definition": of_run["ways"][name],
            # After another training, or on other rows, runs cannot be compared.
            "text": digest([row["text"], row["settings"], of_run["code"]]),
            "settings": dataclasses.asdict(settings),
            "losses": tuned["losses"],
            "held_out": tuned["held_out"],
        }
        for name, tuned in row["tuned"].items()
    ]
