"""The study of INT4: its rows and tables."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from experiments.int4_study import ways
from experiments.int4_study.increases import (
    Ratio,
    by_arm,
    excesses,
    mean_increase,
    ratio,
    ways_of,
)
from experiments.int4_study.picture import draw
from experiments.int4_study.ways import RIVALS, WAYS
from experiments.loss_study import study as loss_study
from experiments.loss_study.arms import SIZES
from experiments.loss_study.conditions import conditions_of
from experiments.row_files import Row, digest
from experiments.study import tables
from experiments.study.statistics import Cost, Effect
from experiments.study.study import Call

DONE = "int4"  # the field of a definition with the digest of the ways
COMPILING = 150.0  # seconds of a run: a program for each way, and the matrices of compensation
CAPTION = "Nats for each token. ± is half of a 95 % interval from the differences over seeds."
RATIOS = "Geometric means over seeds, with 95 % intervals; ? where an increase is not positive."


def rows_of(call: Call, name: str, seeds: Sequence[int], text: str) -> list[Row]:
    """The row of a run: that of the loss study, and the ways to quantize."""
    done = {DONE: digest(ways.described())}
    return [loss_study.row_of(call, name, seed, text, **done) for seed in seeds]


def seconds_of(call: Call) -> float:
    """How long a run takes alone on an H200: a forward pass takes a third of a step's time."""
    settings = call.settings
    forwards = len(WAYS) * settings.held_out + 3 * ways.CALIBRATION
    tokens = settings.tokens + settings.sequence * forwards / 3
    return COMPILING + float(tokens / SIZES[call.size].tokens_per_second)


def show(rows: list[Row], folder: Path | None) -> None:
    """Prints increases, their ratios to FireQ's, and how they depend on the training."""
    for conditions, group in conditions_of(rows).items():
        arms, kinds = by_arm(group), ways_of(group)
        if folder is not None:
            draw(conditions, group, folder / f"int4_study_{group[0]['size'].lower()}.png")
        cells = [["", *arms]]
        for way in kinds:
            cells.append([way, *(_nats(mean_increase(of_arm, way)) for of_arm in arms.values())])
        tables.show(f"Increase of the held-out loss\n{conditions}", cells, CAPTION)
        cells = [["", *arms]]
        for way, rival in RIVALS.items():
            found = (ratio(of_arm, way, rival) for of_arm in arms.values())
            cells.append([f"{way} / {rival}", *map(_ratio, found)])
        tables.show("Ratios of increases", cells, RATIOS)
        if above := excesses(group):
            cells = [["", "", "excess", "Holm p"]]
            cells += [[arm, way, *_excess(effect)] for (arm, way), effect in above.items()]
            caption = "Below 0, the network loses less than the one of its seed trained in BF16."
            tables.show("Increases, above those of networks trained in BF16", cells, caption)


def _nats(found: Cost | Effect) -> str:
    half = "?" if math.isnan(found.half) else f"{found.half:.5f}"
    return f"{found.mean:+.5f} ± {half}"


def _ratio(found: Ratio) -> str:
    if math.isnan(found.mean):
        return "?"
    interval = "?" if math.isnan(found.low) else f"{found.low:.2f} .. {found.high:.2f}"
    return f"{found.mean:.2f} ({interval})"


def _excess(effect: Effect) -> list[str]:
    return [_nats(effect), "?" if math.isnan(effect.holm) else f"{effect.holm:.2g}"]


STUDY = dataclasses.replace(
    loss_study.STUDY,
    name="int4_study",
    usual=("bf16", "coat"),
    measures={"losses", "skipped", "quantized"},
    module="experiments.int4_study.quantizing",
    rows_of=rows_of,
    show=show,
    seconds_of=seconds_of,
)
