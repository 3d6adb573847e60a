"""`make demo`: one tiny Llama, trained in BF16 and in COAT, generates text with both.

    llama_tiny:bf16    BF16 layers, AdamW with FP32 moments
    llama_tiny         FP8 layers and saved activations, AdamW with 8-bit moments

Both start from the same parameters and see the same bytes of Python's own source in the same
order. Prints a table and what each writes, and draws their losses. On a CPU products in FP8 are
computed in FP32, and slower than in BF16; what they gain on a GPU is measured elsewhere. Losses are
in nats per byte; a model that knows nothing has ln 256 = 5.55.
"""

import argparse
import dataclasses
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import jax
from rich.console import Console
from rich.table import Table

from coat_jax import generation
from coat_jax.training.checkpoint import weights
from coat_jax.training.cluster.mesh import make_mesh
from coat_jax.training.config import TrainConfig
from coat_jax.training.config_files import load_config
from coat_jax.training.loop import train
from coat_jax.training.report import accounting, plot
from coat_jax.training.setup import prepare
from experiments import records

RUNS = {"BF16": "llama_tiny:bf16", "COAT": "llama_tiny"}
LAST = 20  # steps whose mean is the final training loss
SMALLEST_RUN = 2 * LAST
PROMPT, NEW_TOKENS = "def read(self, ", 160


class Outcome(NamedTuple):
    """The results of a run that the demo compares."""

    name: str
    final_loss: float  # the mean of the last steps
    held_out_loss: float
    optimizer_bytes: int
    saved_activation_bytes: int  # of one batch
    text: str


def main() -> None:
    """Trains, reports, writes."""
    options = parse()
    console = Console()
    options.out.mkdir(parents=True, exist_ok=True)
    folder = options.out / "demo"
    shutil.rmtree(folder, ignore_errors=True)  # the runs of an earlier demo
    outcomes = []
    for name, source in RUNS.items():
        console.rule(f"{name}, {options.steps} steps")
        config = dataclasses.replace(
            load_config(source),
            total_steps=options.steps,
            seed=options.seed,
            out=str(folder / name),
        )
        train_whole(config, console)
        outcomes.append(outcome(name, config))
    console.rule("Results")
    for one in outcomes:
        console.print(f"[bold]{one.name} writes[/bold]", highlight=False)
        console.print(PROMPT + one.text + "\n", markup=False, highlight=False)
    console.print(table(*outcomes))
    picture, figures = options.out / "demo.png", options.out / "demo.json"
    plot.draw([folder / name for name in RUNS], picture, smooth=LAST)
    settings = {"steps": options.steps, "seed": options.seed}
    records.write(figures, {"settings": settings, "outcomes": [o._asdict() for o in outcomes]})
    console.print(f"Losses: {picture}\nFigures: {figures}", highlight=False, soft_wrap=True)


def train_whole(config: TrainConfig, console: Console) -> None:
    """Trains to the last step; where a signal stops it before, the program ends."""
    found = train(config, console)
    if found.stopped:
        sys.exit(f"Stopped at step {found.step}: only whole runs are compared.")


def parse() -> argparse.Namespace:
    """Reads the command line; a bad value ends the program with code 2."""
    as_it_is = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("demo", description=__doc__, formatter_class=as_it_is)
    add = parser.add_argument
    add("--steps", type=int, default=150, help=f"of training, at least {SMALLEST_RUN} (150)")
    add("--out", type=Path, default=Path("out"), help="the folder for all results (out)")
    add("--seed", type=int, default=0, help="of parameters and the order of the data (0)")
    options = parser.parse_args()
    if options.steps < SMALLEST_RUN:
        parser.error(f"argument --steps: {options.steps} is fewer than {SMALLEST_RUN}")
    if options.seed < 0:
        parser.error(f"argument --seed: {options.seed} is below 0")
    return options


def outcome(name: str, config: TrainConfig) -> Outcome:
    """The results of a run."""
    (run,) = plot.load([Path(config.out)], [name])
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        state = prepare(config, mesh).abstract
    model, reader = weights.load(config.out), generation.Bytes()
    tokens = reader.encode(PROMPT)
    (new,) = generation.generate(model, [tokens], max_tokens=NEW_TOKENS)
    spoken = reader.reader(tokens)
    return Outcome(
        name,
        float(run.curve("loss")[1, -LAST:].mean()),
        float(run.curve("held_out_loss")[1, -1]),
        sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.moments)),
        accounting.saved_activations(config, config.global_batch_size),
        spoken.read(new) + spoken.end(),
    )


def table(bf16: Outcome, coat: Outcome) -> Table:
    """The comparison, with COAT over BF16 in the last column."""
    shown = Table(title="The same training run, twice")
    shown.add_column()
    for name in (bf16.name, coat.name, "ratio"):
        shown.add_column(name, justify="right")
    rows = (
        (f"training loss, last {LAST} steps", "final_loss", ".4f"),
        ("held-out loss", "held_out_loss", ".4f"),
        ("optimizer state, bytes", "optimizer_bytes", ",d"),
        ("saved activations, bytes", "saved_activation_bytes", ",d"),
    )
    for label, field, form in rows:
        a, b = (getattr(one, field) for one in (bf16, coat))
        shown.add_row(label, format(a, form), format(b, form), f"{b / a:.3f}")
    return shown


if __name__ == "__main__":
    main()
