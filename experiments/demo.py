"""`make demo`: one small Llama trained twice, by optax's AdamW and by the same in FP8.

Both start from the same parameters and see the same bytes in the same order, with the same
learning rate, weight decay and clipping; they differ in how the two moments are stored:

    optax.adamw               FP32          8 bytes per parameter
    coat.optax.fp8_adamw      expanded FP8  2.1 bytes per parameter

Prints a table, and writes its figures and a chart. On a CPU an FP8 step is the plain `jnp`
reference and takes longer than optax's; the fused kernels are for GPUs, measured elsewhere.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

import coat_jax as coat
from experiments import corpus, records, small_llama

BATCH, SEQUENCE = 8, 128
PEAK, WARMUP = 3e-3, 0.1  # learning rate; the part of the run in which it rises
LAST = 20  # steps whose mean is the final training loss
HELD_OUT_BATCHES = 16
LINE_EVERY = 20  # steps, where there is no terminal to draw on

SMALLEST_RUN = 2 * LAST
DESCRIPTION = """\
Trains one small Llama twice, with optax.adamw and with coat.optax.fp8_adamw, from the same
parameters and on the same text, and compares their losses and the sizes of their states."""
EPILOG = """\
examples:
  python -m experiments.demo                    as `make demo` runs it
  python -m experiments.demo --steps 60         a glance
  python -m experiments.demo --seed 1           other parameters and other batches

Losses are in nats per byte; a model that knows nothing has ln 256 = 5.55.
"""


class Runner(NamedTuple):
    """A model, the optimizer that trains it, and its training loss after each step."""

    name: str
    model: small_llama.Llama
    optimizer: nnx.Optimizer
    losses: list[float]


class Outcome(NamedTuple):
    """What the demo compares."""

    name: str
    losses: list[float]
    final_loss: float  # the mean of the last steps
    held_out_loss: float
    state_bytes: int
    bytes_per_parameter: float


def main() -> None:
    """Trains, reports, writes."""
    arguments = parse()
    console = Console()
    text = corpus.load()
    optimizers = {"AdamW": optax.adamw, "FP8 AdamW": coat.optax.fp8_adamw}
    runners = [
        runner(name, adamw, arguments.steps, arguments.seed) for name, adamw in optimizers.items()
    ]
    parameters = sum(p.size for p in jax.tree.leaves(nnx.state(runners[0].model, nnx.Param)))
    console.print(
        f"A Llama of {parameters / 1e6:.2f} million parameters learns Python, twice, from "
        f"{len(text.train) / 1e6:.1f} MB of the standard library's source.\n"
        f"Losses are in nats per byte, the mean of {LAST} steps.",
        highlight=False,
    )

    data = corpus.batches(text.train, BATCH, SEQUENCE, arguments.seed)
    train(runners, data, arguments.steps, console)
    baseline, fp8 = outcomes = [outcome(r, text, parameters) for r in runners]

    console.print(table(baseline, fp8))
    console.print(f"{fp8.name}: {verdict(baseline, fp8)}", highlight=False)
    picture, figures = arguments.out / "demo.png", arguments.out / "demo.json"
    draw(baseline, fp8, picture)
    settings = {
        "steps": arguments.steps,
        "seed": arguments.seed,
        "batch": BATCH,
        "sequence": SEQUENCE,
        "peak_learning_rate": PEAK,
        "parameters": parameters,
        "corpus": text.digest,
    }
    records.write(figures, {"settings": settings, "outcomes": [o._asdict() for o in outcomes]})
    console.print(f"Chart: {picture}\nFigures: {figures}", highlight=False, soft_wrap=True)


def parse() -> argparse.Namespace:
    """Reads the command line; a bad value ends the program with one line and code 2."""
    parser = Parser(
        prog="demo",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--steps",
        type=whole_number(at_least=SMALLEST_RUN),
        default=200,
        help=f"training steps, at least {SMALLEST_RUN}: the final loss is the mean of the last "
        f"{LAST} (%(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out"),
        help="the folder for demo.png and demo.json (%(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=whole_number(at_least=0),
        default=0,
        help="draws the first parameters and the batches, the same for both (%(default)s)",
    )
    arguments = parser.parse_args()
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --out: cannot make the folder {arguments.out}: {error.strerror}")
    return arguments


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Ends the program with code 2."""
        self.exit(2, f"{self.prog}: {message} (--help explains)\n")


def whole_number(*, at_least: int) -> Callable[[str], int]:
    """A type of argument."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < at_least:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a whole number of {at_least} or more"
            )
        return int(text)

    return read


def runner(name: str, adamw: Callable[..., Any], steps: int, seed: int) -> Runner:
    """A fresh model and its optimizer; `adamw` is the only thing that two runners differ in."""
    model = small_llama.Llama(small_llama.Config(), rngs=nnx.Rngs(seed))
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, PEAK, warmup_steps=int(WARMUP * steps), decay_steps=steps, end_value=PEAK / 10
    )
    tx = optax.chain(optax.clip_by_global_norm(1.0), adamw(schedule, b2=0.95, weight_decay=0.1))
    return Runner(name, model, nnx.Optimizer(model, tx, wrt=nnx.Param), [])


@nnx.jit
def step(
    model: small_llama.Llama, optimizer: nnx.Optimizer, tokens: Int[Array, "B S+1"]
) -> Float[Array, ""]:
    """One step of training, in place; returns the loss before it."""
    loss, gradients = nnx.value_and_grad(small_llama.loss)(model, tokens)
    optimizer.update(model, gradients)
    return loss


def train(
    runners: list[Runner], data: Iterator[Int[np.ndarray, "B S+1"]], steps: int, console: Console
) -> None:
    """Steps all runners on the same batches, side by side, and says how it goes."""

    def step_all() -> None:
        tokens = next(data)
        for r in runners:
            r.losses.append(float(step(r.model, r.optimizer, tokens)))

    with console.status("Compiling two training steps, for some 20 seconds ..."):
        step_all()
    columns = BarColumn(bar_width=8), TextColumn("{task.description}")  # within 80 characters
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task("", total=steps, completed=1)
    begin = time.perf_counter()
    with bar:
        for done in range(2, steps + 1):
            step_all()
            line = progress(runners, done, steps, time.perf_counter() - begin)
            bar.update(task, completed=done, description=line)
            if not console.is_terminal and done % LINE_EVERY == 0:
                print(line, flush=True)


def progress(runners: list[Runner], done: int, steps: int, seconds: float) -> str:
    """One line: where the runs are, and how long they still take. The clock began at step 1."""
    per_step = seconds / (done - 1)
    losses = "  ".join(f"{r.name} {np.mean(r.losses[-LAST:]):.3f}" for r in runners)
    left = round((steps - done) * per_step)
    speed = f"{BATCH * SEQUENCE / per_step:,.0f} tokens/s"
    return f"step {done}/{steps}  {losses}  {speed}  {left // 60}:{left % 60:02} left"


def outcome(r: Runner, text: corpus.Corpus, parameters: int) -> Outcome:
    """Evaluates on text that was held out, the same for every run, and weighs the state."""
    loss = nnx.jit(small_llama.loss)
    data = corpus.batches(text.held_out, BATCH, SEQUENCE, seed=0)
    held_out = np.mean([loss(r.model, next(data)) for _ in range(HELD_OUT_BATCHES)])
    size = sum(x.nbytes for x in jax.tree.leaves(r.optimizer.opt_state))
    final = float(np.mean(r.losses[-LAST:]))
    return Outcome(r.name, r.losses, final, float(held_out), size, size / parameters)


def table(baseline: Outcome, fp8: Outcome) -> Table:
    """The comparison, with FP8 over baseline in the last column."""
    shown = Table(title="The same training run, with two ways to store its moments")
    shown.add_column()
    for name in (baseline.name, fp8.name, "ratio"):
        shown.add_column(name, justify="right")
    for label, field, form in (
        (f"training loss, last {LAST} steps", "final_loss", ".4f"),
        ("held-out loss", "held_out_loss", ".4f"),
        ("optimizer state, bytes", "state_bytes", ",d"),
        ("bytes per parameter", "bytes_per_parameter", ".3f"),
    ):
        a, b = getattr(baseline, field), getattr(fp8, field)
        shown.add_row(label, format(a, form), format(b, form), f"{b / a:.3f}")
    return shown


def verdict(baseline: Outcome, fp8: Outcome) -> str:
    """The table in a sentence."""
    smaller = baseline.state_bytes / fp8.state_bytes
    apart = fp8.held_out_loss / baseline.held_out_loss - 1
    return f"{smaller:.2f} times smaller optimizer state, held-out loss {apart:+.2%}"


def draw(baseline: Outcome, fp8: Outcome, path: Path) -> None:
    """Two loss curves, the FP8 run's inside the baseline's, and two bars."""
    looks = ((baseline, records.PALE, 5.0), (fp8, records.ACCENT, 1.5))
    with mpl.rc_context(records.CHART):
        figure, (curves, bars) = plt.subplots(1, 2, figsize=(10, 4.4), width_ratios=(2.1, 1))
        figure.suptitle(f"{fp8.name}: {verdict(baseline, fp8)}")
        for place, (o, color, width) in enumerate(looks):
            smooth = np.convolve(o.losses, np.ones(LAST) / LAST, mode="valid")
            steps = np.arange(LAST, len(o.losses) + 1)
            label = f"{o.name}, ends at {o.final_loss:.3f}"
            curves.plot(steps, smooth, color=color, linewidth=width, label=label)
            bars.bar(o.name, o.state_bytes, 0.6, color=color)
            weight = f"{o.state_bytes / 1e6:.2f} MB\n{o.bytes_per_parameter:.2f} bytes/parameter"
            above = (0, 5)
            bars.annotate(
                weight, (place, o.state_bytes), above, textcoords="offset points", ha="center"
            )
        curves.set_title(f"Training loss, nats per byte (mean of {LAST} steps)")
        curves.set(xlabel="step", xlim=(0, 1.02 * len(fp8.losses)))
        curves.legend(loc="upper right")
        bars.set_title("Optimizer state")
        bars.set(yticks=[], xlim=(-0.6, 1.6), ylim=(0, 1.25 * baseline.state_bytes))
        bars.spines["left"].set_visible(False)
        figure.savefig(path)


if __name__ == "__main__":
    main()
