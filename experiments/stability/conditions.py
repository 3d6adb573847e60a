"""Which runs can be compared: those of the same model, settings and text."""

import json
from collections import defaultdict
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from experiments.row_files import Row, digest
from experiments.stability.arm import Settings
from experiments.stability.curves import unpacked
from experiments.stability.events import Events

# Raise it when a change of the code changes what a run computes: runs are then made again.
VERSION = 1  # which rows that name none have, too
GONE = {"head": False}  # fields that arms had once, with the values of those that did without


class Run(NamedTuple):
    """What happened in a run, and its signals: of every n-th step, in the order of `Signals`."""

    events: Events
    signals: Float[np.ndarray, "3 points"]


Runs = dict[float, dict[int, Run]]  # of an arm, by learning rate and seed


class Conditions(NamedTuple):
    """Runs that can be compared, and under which conditions they were made.

    Attributes:
        name: for files; no other conditions have it.
        size: of the model.
        settings: of the runs.
        ceiling: the loss without learning; see `events`.
        device: that they were made on; several are joined.
        arms: runs by the name of their arm.
    """

    name: str
    size: str
    settings: Settings
    ceiling: float
    device: str
    arms: dict[str, Runs]

    @property
    def title(self) -> str:
        """What these conditions are, for tables and pictures."""
        s = self.settings
        rate = f", learning rate down to {s.final_ratio:g} of the highest" if s.final_ratio else ""
        clip = f", gradients clipped to {s.clip_norm:g}" if s.clip_norm != 1 else ""
        return f"{self.size}, {s.steps} steps of {s.batch} x {s.sequence} bytes{rate}{clip}"


def of_today(row: Row) -> Row:
    """A row that names its version, with the definition that its arm has today."""
    definition = {n: v for n, v in row["definition"].items() if GONE.get(n, ...) != v}
    return {"version": 1} | row | {"definition": definition}


def conditions_of(rows: list[Row]) -> list[Conditions]:
    """Groups of runs that can be compared.

    Of an arm that was defined in several ways, and of a seed that was measured several times, the
    last row counts: files grow at their end.
    """
    groups = defaultdict(list)
    for row in rows:
        groups[json.dumps([row["model"], row["settings"], row["text"]])].append(row)
    return [_conditions(group) for group in groups.values()]


def _conditions(rows: list[Row]) -> Conditions:
    definitions = {row["arm"]: row["definition"] for row in rows}
    rows = [row for row in rows if row["definition"] == definitions[row["arm"]]]
    arms: dict[str, Runs] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        arms[row["arm"]][row["learning_rate"]] |= dict(zip(row["seeds"], _runs(row), strict=True))
    first = rows[0]
    which = digest([first["model"], first["settings"], first["text"]])
    return Conditions(
        f"{first['size'].lower()}_{which[:4]}",
        first["size"],
        Settings(**first["settings"]),
        first["ceiling"],
        ", ".join(sorted({row["parents"]["device"] for row in rows})),
        {arm: dict(sorted(by_rate.items())) for arm, by_rate in arms.items()},
    )


def _runs(row: Row) -> list[Run]:
    final = [np.inf if loss is None else loss for loss in row["final"]]
    events = map(Events, row["outcome"], final, row["onset"])
    return list(map(Run, events, unpacked(row["curves"]).swapaxes(0, 1)))
