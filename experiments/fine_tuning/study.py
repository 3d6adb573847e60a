"""The study of fine-tuning: the loss study's tables, of runs that only tune."""

import dataclasses
from argparse import ArgumentParser
from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments.fine_tuning import ways
from experiments.loss_study import study as loss_study
from experiments.loss_study.arm import Settings
from experiments.loss_study.arms import SIZES
from experiments.loss_study.conditions import completed
from experiments.loss_study.show import show as show_losses
from experiments.loss_study.training import FORWARDS
from experiments.row_files import Row, digest
from experiments.study.study import Call


def declare(parser: ArgumentParser) -> None:
    """The arguments of the loss study, and the ways of tuning."""
    loss_study.declare(parser)
    parser.add_argument(
        "--ways", nargs="+", choices=ways.WAYS, default=list(ways.USUAL), metavar="WAY",
        help=f"of tuning: {', '.join(ways.WAYS)} (default: {' '.join(ways.USUAL)})",
    )  # fmt: skip


def rows_of(call: Call, name: str, seeds: Sequence[int], text: str) -> list[Row]:
    """The row of a run: that of the loss study, and how it is tuned."""
    tuned = ways.definitions(call.options.ways)
    return [loss_study.row_of(call, name, seed, text, tuned=tuned) for seed in seeds]


def cost_of(settings: Settings, names: Iterable[str]) -> float:
    """A run, in tokens that are trained on: a forward pass takes a third of a step's time."""
    count = len([*names])
    steps = settings.steps + count * ways.STEPS
    forwards = (1 + count) * (1 + len(FORWARDS))
    return settings.sequence * (steps * settings.batch + forwards * settings.held_out / 3)


def seconds_of(call: Call) -> float:
    """How long a run takes alone on an H200."""
    return cost_of(call.settings, call.options.ways) / SIZES[call.size].tokens_per_second


def of_today(row: Row) -> Row:
    """A row with the definitions of ways that are written today, without hashes of the code."""
    row = loss_study.STUDY.of_today(row)
    definition = {name: of for name, of in row["definition"].items() if name != "forward"}
    tuned = {name: of for name, of in definition["tuned"].items() if name != "code"}
    tuned["ways"] = {name: completed(way) for name, way in tuned["ways"].items()}
    return row | {"definition": definition | {"tuned": tuned}}


def ways_of(row: Row) -> list[Row]:
    """A row for each way of tuning, as the loss study would have of a run."""
    how, before = row["definition"]["tuned"], Settings(**row["settings"])
    rate = how["rate"] * before.learning_rate
    settings = dataclasses.replace(before, steps=how["steps"], learning_rate=rate)
    return [
        row
        | {
            "arm": name,
            "network": row["key"],
            "definition": how["ways"][name],
            # After another training runs cannot be compared.
            "text": digest([row["text"], row["settings"]]),
            "settings": dataclasses.asdict(settings),
            "losses": tuned["losses"],
            "held_out": tuned["held_out"],
        }
        for name, tuned in row["tuned"].items()
    ]


def show(rows: list[Row], folder: Path | None) -> None:
    """Prints what each way of tuning costs."""
    del folder
    show_losses([way for row in rows for way in ways_of(row)], None)


STUDY = dataclasses.replace(
    loss_study.STUDY,
    name="fine_tuning",
    usual=("bf16",),
    measures={"losses", "skipped", "before", "tuned"},
    module="experiments.fine_tuning.tuning",
    rows_of=rows_of,
    show=show,
    of_today=of_today,
    declare=declare,
    seconds_of=seconds_of,
)
