"""One tiny model that sees, trained in BF16 and in COAT: what each reads in 2,000 new drawings.

    vlm_tiny:bf16    BF16 layers, AdamW with FP32 moments
    vlm_tiny         FP8 layers and saved activations in tower and decoder, AdamW with 8-bit moments

Both start from the same parameters and see the same drawings in the same order. A drawing has two
to four digits. The questions are which they are, what is in one of the corners, and how many there
are; an answer is right if all of it is. McNemar's test asks whether one model is right more often
than the other, from the drawings on which they differ.
"""

import argparse
import dataclasses
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from coat_jax import generation
from coat_jax.cli.model_folder import ModelFolder
from coat_jax.cli.pictures import Asker
from coat_jax.training.config_files import load_config
from coat_jax.training.data.drawings import COUNTS, Drawing, draw
from experiments import records
from experiments.command import ROOT, parser_of
from experiments.demo import train_whole

RUNS = {"BF16": "vlm_tiny:bf16", "COAT": "vlm_tiny"}
KINDS = {"read": "read the digits", "place": "what is where", "count": "how many"}
TOGETHER = 250  # questions at a time
MOST_TOKENS = 6  # of an answer: four digits, a dash, the end
SHOWN = 8  # drawings in the picture

Answers = dict[str, list[str]]  # by kind, in the order of the drawings


class Compared(NamedTuple):
    """How often both models are right, of questions of a kind."""

    kind: str
    questions: int
    bf16: int
    coat: int
    p: float  # McNemar's, exact


def main() -> None:
    """Trains, asks, reports, draws."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, help="of training (default: the config's)")
    parser.add_argument("--drawings", type=int, default=COUNTS["held_out"], help="to ask about")
    options = parser.parse_args()
    console, folder = Console(), ROOT / "out" / "vision_demo"
    shutil.rmtree(folder, ignore_errors=True)
    drawings = [draw("held_out", number) for number in range(options.drawings)]
    answers: dict[str, Answers] = {}
    for name, source in RUNS.items():
        console.rule(name)
        config = load_config(source)
        steps = options.steps or config.total_steps
        config = dataclasses.replace(config, total_steps=steps, out=str(folder / name))
        train_whole(config, console)
        answers[name] = ask(folder / name, drawings)
    console.rule("Results")
    compared = [compare(kind, drawings, *answers.values()) for kind in KINDS]
    console.print(table(compared))
    figures = {"drawings": len(drawings), "compared": [one._asdict() for one in compared]}
    records.write(options.out / "vision_demo.json", figures)
    draw_answers(options.out / "vision_demo.png", drawings[:SHOWN], answers)
    console.print(f"Drawings, and what both say of them: {options.out / 'vision_demo.png'}")


def ask(folder: Path, drawings: list[Drawing]) -> Answers:
    """The answers of a run's model."""
    of_folder = ModelFolder(
        argparse.Namespace(where=folder, step=None, precision=None, tokenizer=None)
    )
    asker, model = Asker(of_folder, None), of_folder.load()
    found: Answers = defaultdict(list)
    for kind in KINDS:
        for first in range(0, len(drawings), TOGETHER):
            some = drawings[first : first + TOGETHER]
            new = generation.generate(
                model,
                [asker.tokens(drawing.questions[kind][0], 1) for drawing in some],
                max_tokens=MOST_TOKENS,
                sampling=generation.Sampling(temperature=0),
                stops=of_folder.stops,
                images=[[drawing.pixels] for drawing in some],
            )
            readers = [of_folder.tokenizer.reader([]) for _ in new]
            found[kind] += [r.read(one) + r.end() for r, one in zip(readers, new, strict=True)]
    return found


def compare(kind: str, drawings: list[Drawing], bf16: Answers, coat: Answers) -> Compared:
    """Counts right answers, and tests whether one model has more of them."""
    from scipy import stats

    wanted = [drawing.questions[kind][1] for drawing in drawings]
    right = [
        np.array([a == w for a, w in zip(a_of[kind], wanted, strict=True)]) for a_of in (bf16, coat)
    ]
    only = [int(np.sum(a & ~b)) for a, b in (right, right[::-1])]
    p = float(stats.binomtest(only[0], sum(only)).pvalue) if sum(only) else 1.0
    return Compared(kind, len(wanted), *(int(of_one.sum()) for of_one in right), p)


def table(compared: list[Compared]) -> Table:
    """Shares of right answers."""
    shown = Table(title=f"Right answers to {compared[0].questions:,} questions of each kind")
    for column in ("", *RUNS, "McNemar's p"):
        shown.add_column(column, justify="right" if column else "left")
    for one in compared:
        shares = (f"{100 * right / one.questions:.1f} %" for right in (one.bf16, one.coat))
        shown.add_row(KINDS[one.kind], *shares, f"{one.p:.2g}")
    return shown


def draw_answers(path: Path, drawings: list[Drawing], answers: dict[str, Answers]) -> None:
    """Draws pictures with their questions, and what both models say."""
    import matplotlib.pyplot as plt

    with plt.rc_context(records.CHART | {"axes.grid": False}):
        columns = -(-len(drawings) // 2)
        figure, axes = plt.subplots(2, columns, figsize=(3.2 * columns, 7.6), squeeze=False)
        for number, drawing in enumerate(drawings):
            place: Any = axes[divmod(number, columns)]
            place.imshow(drawing.pixels)
            place.set_xticks([])
            place.set_yticks([])
            lines = []
            for kind, (question, answer) in sorted(drawing.questions.items()):
                said = "  ".join(
                    f"{name} {of[kind][number]}{'' if of[kind][number] == answer else ' (wrong)'}"
                    for name, of in answers.items()
                )
                lines.append(f"{question}  {said}")
            place.set_xlabel("\n".join(lines), fontsize=7, loc="left")
        figure.suptitle("Drawings that neither model has seen, and their answers")
        figure.savefig(path)
        plt.close(figure)


if __name__ == "__main__":
    main()
