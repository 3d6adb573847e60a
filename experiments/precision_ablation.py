"""What each part of COAT costs in loss: products, saved activations, optimizer, and all of them.

The paper (figures 5 and 6) trains with all of them, and does not say how much each part costs. Here
a small Llama learns Python's own source from the same parameters, on the same batches, at the same
learning rates, under precisions that differ by one `dataclasses.replace`:

    python -m experiments.precision_ablation                 300 steps each, on any machine
    python -m experiments.precision_ablation --steps 40      a glance

Arithmetic is FP32 where it is not FP8, so that FP8 is all the difference. Losses are in nats per
byte: the mean of the last steps, and that over files that were held out. "other seed" has other
parameters at the start and other batches: it shows how far two runs of this length may end apart.
Differences this small between single runs cannot rank the parts; `loss_study` does.
"""

import dataclasses
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import coat_jax as coat
from coat_jax import models
from experiments import corpus, records
from experiments.command import parser_of

BATCH, SEQUENCE, LAST, HELD_OUT_BATCHES = 8, 128, 30, 16
PEAK = 3e-3
CONFIG = models.Config(
    vocab=256, width=128, layers=4, heads=4, kv_heads=4, head_dim=32, ffn=384,
    context=SEQUENCE, dtype=jnp.float32, precision=coat.BF16, scan=False,
)  # fmt: skip


class Variant(NamedTuple):
    """A precision and an optimizer."""

    precision: coat.Precision
    adamw: Any = optax.adamw
    seed: int = 0


def _all(**changes: Any) -> Variant:
    return Variant(dataclasses.replace(coat.COAT, **changes), coat.optax.fp8_adamw)


VARIANTS = {
    "full precision": Variant(coat.BF16),
    "full precision, other seed": Variant(coat.BF16, seed=1),
    "products in FP8": Variant(coat.FP8_LINEAR),
    "kept activations in FP8": Variant(dataclasses.replace(coat.COAT, fp8_linear=False)),
    "optimizer in FP8": Variant(coat.BF16, coat.optax.fp8_adamw),
    "COAT: all three": _all(),
    "COAT_LEAN: q, k, v too": _all(attention_block=16),
    "COAT, blocks of 128": _all(block=128),
    "COAT, E4M3 gradients": _all(backward=coat.E4M3),
}
BASELINE = "full precision"


def main() -> None:
    """Trains every variant, prints the table and writes the results."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=300, help=f"of training, at least {LAST}")
    options = parser.parse_args()
    if options.steps < LAST:
        parser.error(f"--steps {options.steps} is too few: a loss is the mean of the last {LAST}.")
    text = corpus.load()
    console = Console()
    results: dict[str, dict[str, Any]] = {}
    start = time.perf_counter()
    with Progress(console=console) as progress:
        for name, variant in VARIANTS.items():
            task = progress.add_task(name, total=options.steps)
            results[name] = _train(variant, text, options.steps, lambda t=task: progress.advance(t))
    settings = {
        "steps": options.steps,
        "batch": [BATCH, SEQUENCE],
        "peak learning rate": PEAK,
        "parameters": models.parameters_count(CONFIG),
        "corpus": text.digest,
        "seconds": round(time.perf_counter() - start),
    }
    records.write(
        options.out / "precision_ablation.json", {"settings": settings, "variants": results}
    )
    console.print(_table(results))
    _draw(results, options.out / "precision_ablation.png")


def _train(variant: Variant, text: corpus.Corpus, steps: int, advance: Any) -> dict[str, Any]:
    config = dataclasses.replace(CONFIG, precision=variant.precision)
    model = models.create(config, seed=variant.seed)
    schedule = optax.warmup_cosine_decay_schedule(0.0, PEAK, steps // 10, steps, PEAK / 10)
    tx = optax.chain(
        optax.clip_by_global_norm(1.0), variant.adamw(schedule, b2=0.95, weight_decay=0.1)
    )
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, tokens: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda m: m.loss(tokens[:, :-1], tokens[:, 1:]))(model)
        optimizer.update(model, grads)
        return loss

    evaluate = nnx.jit(lambda model, tokens: model.loss(tokens[:, :-1], tokens[:, 1:]))
    losses = []
    data = corpus.batches(text.train, BATCH, SEQUENCE, variant.seed)
    for _, tokens in zip(range(steps), data, strict=False):
        losses.append(float(step(model, optimizer, jnp.asarray(tokens))))
        advance()
    held_out = corpus.batches(text.held_out, BATCH, SEQUENCE, 0)
    held_out_losses = [
        float(evaluate(model, jnp.asarray(tokens)))
        for _, tokens in zip(range(HELD_OUT_BATCHES), held_out, strict=False)
    ]
    return {
        "losses": losses,
        "final": float(np.mean(losses[-LAST:])),
        "held out": float(np.mean(held_out_losses)),
    }


def _table(results: dict[str, dict[str, Any]]) -> Table:
    table = Table(title=f"Loss, mean of the last {LAST} steps, and over held-out files")
    for column in ("", "final", "against full precision", "held out", "against full precision"):
        table.add_column(column, justify="left" if not column else "right")
    base = results[BASELINE]
    for name, result in results.items():
        cells = []
        for figure in ("final", "held out"):
            cells += [f"{result[figure]:.4f}", f"{result[figure] / base[figure] - 1:+.2%}"]
        table.add_row(name, *cells)
    return table


def _draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    """The losses, and each one's distance to full precision as it goes."""
    import matplotlib.pyplot as plt

    def smooth(losses: list[float]) -> np.ndarray:
        return np.convolve(losses, np.ones(LAST) / LAST, "valid")

    base = smooth(results[BASELINE]["losses"])
    steps = np.arange(LAST, LAST + len(base))
    with plt.rc_context(records.CHART):
        figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.4))
        colors = plt.get_cmap("viridis")(np.linspace(0, 0.9, len(results) - 2))
        left.plot(steps, base, color=records.INK, label=BASELINE)
        left.plot(
            steps, smooth(results["COAT: all three"]["losses"]), "--", color=records.ACCENT,
            label="COAT: all three",
        )  # fmt: skip
        left.set_ylabel(f"loss, mean of {LAST} steps")
        left.set_title("Full precision and COAT")
        left.legend(frameon=False)
        shown = [name for name in results if name != BASELINE and "seed" not in name]
        for name, color in zip(shown, colors, strict=True):
            distance = smooth(results[name]["losses"]) / base - 1
            right.plot(steps, 100 * distance, color=color, label=name)
        right.axhline(0, color=records.INK, lw=1)
        right.set_ylabel("% above full precision")
        right.set_title("What each part costs")
        right.legend(frameon=False, fontsize=8)
        for axes in (left, right):
            axes.set_xlabel("step")
        figure.savefig(path)


if __name__ == "__main__":
    main()
