"""The study of models of videos: its rows."""

import dataclasses
from collections.abc import Sequence

from experiments.drawn_videos import video
from experiments.row_files import Row, digest
from experiments.study.description import described
from experiments.study.rows import new_rows
from experiments.study.study import Call, Study
from experiments.video_study.arms import ARMS, SHAPES, SIZES
from experiments.video_study.show import show

VERSION = 1


def rows_of(call: Call, name: str, seeds: Sequence[int], text: str) -> list[Row]:
    """The rows of runs."""
    model = described(dataclasses.asdict(SIZES[call.size].model_of(ARMS[name])))
    del model["precision"]  # the arm has it
    return new_rows(call, name, seeds, ARMS[name], model, text=text, version=VERSION)


def prepare(call: Call, rows: list[Row], only_plan: bool) -> str:
    """The digest of the videos."""
    del rows, only_plan
    frames, side, _ = SIZES[call.size].model.latents
    return digest([part.tolist() for part in video(0, frames, side, SHAPES)])


STUDY = Study(
    name="video_study",
    arms=ARMS,
    usual=tuple(ARMS),
    sizes=SIZES,
    measures={"losses", "held_out", "samples"},
    module="experiments.video_study.training",
    rows_of=rows_of,
    prepare=prepare,
    show=show,
    side_by_side=2,
)
