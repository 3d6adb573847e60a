"""The stability study: its rows, and arguments of its own."""

import dataclasses
from argparse import ArgumentParser
from collections.abc import Sequence

from coat_jax.tokenizers import digest_of
from coat_jax.training.data import corpus
from experiments.row_files import Row, digest
from experiments.stability.arms import ARMS, BASELINE, SIZES
from experiments.stability.conditions import VERSION, of_today
from experiments.stability.show import show
from experiments.study.description import described
from experiments.study.rows import named
from experiments.study.study import Call, Study


def rows_of(call: Call, name: str, seeds: Sequence[int], text: str) -> list[Row]:
    """The rows of a run: one for each learning rate."""
    size = SIZES[call.size]
    model = described(size.model, types=False)
    # The arm decides the precision. The first runs had no z-loss, no experts and no limit.
    del model["precision"], model["z_loss"], model["experts"], model["axes"]["expert"]
    del model["activation_limit"]
    decides = {
        "definition": described(ARMS[name], types=False),
        "model": digest(model),
        "settings": dataclasses.asdict(call.settings),
        "seeds": list(seeds),
        "text": text,
        "version": VERSION,
    }
    return [
        named({"arm": name, "size": call.size} | decides | {"learning_rate": rate})
        for rate in sorted(set(call.options.learning_rates or size.learning_rates))
    ]


def declare(parser: ArgumentParser) -> None:
    """The grid, and what of it one program trains."""
    parser.add_argument(
        "--learning-rates", type=float, nargs="+", metavar="RATE", help="default: the size's"
    )
    parser.add_argument(
        "--together", type=int, metavar="N", help="seeds in one program (default: the size's)"
    )


def prepare(call: Call, rows: list[Row], only_plan: bool) -> str:
    """The digest of the text, which coat_jax makes when it is first loaded."""
    del call, rows, only_plan
    return digest_of(b"".join(part.tobytes() for part in corpus.load()))


def together(call: Call) -> int:
    """How many seeds one program trains."""
    return int(call.options.together or SIZES[call.size].together)


STUDY = Study(
    name="stability",
    arms=ARMS,
    usual=(BASELINE, "e8m3", "coat"),
    sizes=SIZES,
    measures={"ceiling", "final", "outcome", "onset", "skipped", "curves"},
    module="experiments.stability.training",
    rows_of=rows_of,
    prepare=prepare,
    show=show,
    of_today=of_today,
    declare=declare,
    together=together,
    side_by_side=1,  # a program takes most of a GPU's memory
)
