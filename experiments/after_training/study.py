"""The study of quantization after training: its rows and tables."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from experiments.after_training import recipes
from experiments.after_training.changes import costs, excesses, measured
from experiments.after_training.recipes import AFTER_FURTHER, FURTHER, RECIPES
from experiments.loss_study import study as loss_study
from experiments.loss_study.arms import SIZES
from experiments.loss_study.conditions import conditions_of
from experiments.row_files import Row, digest
from experiments.study import tables
from experiments.study.study import Call

DONE = "after training"  # the field of a definition with the digest of what is done then
# Digests that also covered what does not matter, and the one of what has not changed since.
EARLIER = "c8a43cb91722", "6795ca705e05", "4b35a942f1ec", "3b7eb997d493", "f49dee1d708d"
TODAY = "5fb3ad8e96b5"
COMPILING = 150.0  # seconds of a run: a program for each recipe, and three that train
CAPTION = (
    "± is half of a 95 % interval from the differences over seeds. 'After steps in X': above the "
    "loss in BF16 after as many steps in BF16."
)


def rows_of(call: Call, name: str, seeds: Sequence[int], text: str) -> list[Row]:
    """The row of a run: that of the loss study, and what happens after training."""
    done = {DONE: digest(recipes.described())}
    return [loss_study.row_of(call, name, seed, text, **done) for seed in seeds]


def of_today(row: Row) -> Row:
    """A row with the definition that it would have today."""
    row = loss_study.STUDY.of_today(row)
    done = row["definition"][DONE]
    return row | {"definition": row["definition"] | {DONE: TODAY if done in EARLIER else done}}


def seconds_of(call: Call) -> float:
    """How long a run takes alone on an H200: a forward pass takes a third of a step's time."""
    settings = call.settings
    steps = settings.steps + len(FURTHER) * recipes.FURTHER_STEPS
    forwards = 3 + len(RECIPES) + len(FURTHER) * (1 + len(AFTER_FURTHER))
    tokens = settings.sequence * (steps * settings.batch + forwards * settings.held_out / 3)
    return COMPILING + float(tokens / SIZES[call.size].tokens_per_second)


def show(rows: list[Row], folder: Path | None) -> None:
    """Prints the costs, and those above the costs of networks that were trained in BF16."""
    del folder
    for conditions, group in conditions_of(rows).items():
        of_arms, kinds = costs(group), measured(group)
        cells = [["", *of_arms]]
        cells += [[str(what), *(str(of_arms[arm][what]) for arm in of_arms)] for what in kinds]
        tables.show(f"Held-out loss above BF16\n{conditions}", cells, CAPTION)
        above = {what: excesses(group, what) for what in kinds}
        if arms := [*above[kinds[0]]]:
            cells = [["", *(column for arm in arms for column in (arm, "Holm p"))]]
            for what, effects in above.items():
                cells.append([str(what)])
                for arm in arms:
                    p = effects[arm].holm
                    cells[-1] += [str(effects[arm]), "?" if math.isnan(p) else f"{p:.2g}"]
            tables.show("The same, above that of networks trained in BF16", cells)


STUDY = dataclasses.replace(
    loss_study.STUDY,
    name="after_training",
    usual=("bf16", "products", "coat"),
    measures={"losses", "skipped", "held_out", "quantized", "further"},
    module="experiments.after_training.quantizing",
    rows_of=rows_of,
    show=show,
    of_today=of_today,
    seconds_of=seconds_of,
)
