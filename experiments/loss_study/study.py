"""The loss study, and what it has in common with studies that train as it does."""

import dataclasses
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coat_jax import models
from experiments.loss_study import text as texts
from experiments.loss_study.arms import ARMS, SIZES
from experiments.loss_study.conditions import of_today, version_of
from experiments.loss_study.show import show
from experiments.row_files import Row, digest
from experiments.study.description import described
from experiments.study.rows import named
from experiments.study.study import Call, Study

# Fields that the first runs did not have, with what they did.
LATER = {"activation": "silu", "activation_limit": None, "z_loss": 0.0, "experts": None}
PREPARING = 90  # seconds for text and tokens, on an H200 machine with 16 cores


def row_of(call: Call, name: str, seed: int, text: str, **more: Any) -> Row:
    """A row before it is measured.

    Args:
        call: which runs are to be made.
        name: of the arm.
        seed: of the initial parameters and of the order of the rows of text.
        text: its digest.
        more: fields of the definition besides those of the arm.
    """
    row: Row = {
        "arm": name,
        "size": call.size,
        "seed": seed,
        "settings": dataclasses.asdict(call.settings),
        "text": text,
        "definition": described(ARMS[name]) | more,
        "model": model_of(SIZES[call.size].model),
        "version": version_of(ARMS[name]),
    }
    return named(row)


def rows_of(call: Call, name: str, seeds: Sequence[int], text: str) -> list[Row]:
    """The row of a run."""
    return [row_of(call, name, seed, text) for seed in seeds]


def model_of(config: models.Config) -> str:
    """The digest of a model, without what an arm decides."""
    model = dataclasses.asdict(config)
    del model["axes"]["expert"]  # which the first runs did not have
    kept = (n for n in model if n != "precision" and (n, model[n]) not in LATER.items())
    return digest({name: str(model[name]) for name in kept})


def declare(parser: ArgumentParser) -> None:
    """Arguments of the text."""
    parser.add_argument("--text", type=int, default=300, help="megabytes of text at most (300)")
    parser.add_argument(
        "--text-from", type=Path, nargs="+", metavar="FOLDER", help="default: the machine's"
    )


def prepare(call: Call, rows: list[Row], only_plan: bool) -> str:
    """Makes text and tokens, and returns the digest of the text.

    A plan without text supposes that of most runs with the same settings: machines that are
    installed alike have the same text.
    """
    folder, vocab = call.work / "text", SIZES[call.size].model.vocab
    if only_plan and not (folder / texts.NOTES).exists():
        run = call.size, dataclasses.asdict(call.settings)
        same = [row["text"] for row in rows if (row["size"], row["settings"]) == run]
        likely = Counter(same or [row["text"] for row in rows]).most_common(1)
        return str(likely[0][0]) if likely else ""
    places = call.options.text_from or texts.roots()
    notes = texts.prepare(folder, vocab, places=places, limit=call.options.text * 1_000_000)
    tokens = len(texts.load(folder, "train", vocab))
    print(
        f"{tokens / 1e6:.1f} M tokens from {notes['train']['bytes'] / 1e6:.0f} MB of text, what is "
        f"left of {notes['read']['bytes'] / 1e6:.0f} MB without near-duplicates; a run reads "
        f"{call.settings.tokens / 1e6:.1f} M.",
        flush=True,
    )
    texts.require_rows(tokens, call.settings.rows, call.settings.sequence)
    return str(notes["digest"])


def seconds_of(call: Call) -> float:
    """How long a run takes alone on an H200."""
    return float(call.settings.tokens / SIZES[call.size].tokens_per_second)


STUDY = Study(
    name="loss_study",
    arms=ARMS,
    usual=("bf16", "bf16_ulp", "coat"),
    sizes=SIZES,
    measures={"losses", "skipped", "held_out"},
    module="experiments.loss_study.training",
    rows_of=rows_of,
    prepare=prepare,
    show=show,
    of_today=of_today,
    declare=declare,
    seconds_of=seconds_of,
)
