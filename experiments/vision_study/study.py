"""The study of vision-language models: its rows."""

import dataclasses
from collections.abc import Sequence

from experiments.row_files import Row, digest
from experiments.study.description import described
from experiments.study.rows import new_rows
from experiments.study.study import Call, Study
from experiments.vision_study.arms import ARMS, SIZES
from experiments.vision_study.icons import scene_of
from experiments.vision_study.show import show

VERSION = 1


def rows_of(call: Call, name: str, seeds: Sequence[int], text: str) -> list[Row]:
    """The rows of runs."""
    model = described(dataclasses.asdict(SIZES[call.size].model))
    for part in (model, model["tower"], model["decoder"]):
        del part["precision"]  # the arm decides it
        part.get("axes", {}).pop("expert", None)  # which the first runs did not have
    del model["decoder"]["activation_limit"]  # likewise
    return new_rows(call, name, seeds, ARMS[name], model, text=text, version=VERSION)


def prepare(call: Call, rows: list[Row], only_plan: bool) -> str:
    """The digest of the questions."""
    del call, rows, only_plan
    return digest([scene_of(split, 0).questions for split in ("train", "held_out")])


STUDY = Study(
    name="vision_study",
    arms=ARMS,
    usual=("bf16", "bf16_ulp", "decoder_alone", "coat", "coat_int8", "coat_bf16_forward"),
    sizes=SIZES,
    measures={"losses", "held_out", "right"},
    module="experiments.vision_study.training",
    rows_of=rows_of,
    prepare=prepare,
    show=show,
    side_by_side=2,
)
