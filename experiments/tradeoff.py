"""Loss against memory and time: each way to train, with what it costs and what it saves.

    python -m experiments.tradeoff     prints the table and draws tradeoff.png

This measures nothing. Losses above BF16's come from loss_study, with its 40M model; the time of a
layer comes from layer_speed, and what it saves for its backward pass from activation_memory, both
at Llama-2-7B's sizes. A run that begins in BF16 recomputes each layer in these steps, so it needs
no more memory, but runs the forward pass twice.
"""

from pathlib import Path
from typing import NamedTuple

from experiments import records
from experiments.command import parser_of
from experiments.figures.measured.layers import layer, unit
from experiments.figures.measured.loss_study import STUDY, cell, effects
from experiments.loss_study.statistics import Effect

BF16_SHARE = 0.25  # of the runs that begin in BF16

WAYS = {  # a precision, and whether the run begins in BF16: the arm that trains so
    ("FP8_LINEAR", False): "products",
    ("COAT_PAPER", False): "coat_rounded_forward",
    ("COAT", False): "coat",
    ("COAT_LEAN", False): "coat_lean",
    ("COAT_INT8", False): "coat_int8",
    ("COAT", True): "coat_after_bf16",
    ("COAT_LEAN", True): "coat_lean_after_bf16",
}


class Way(NamedTuple):
    """One way to train.

    Attributes:
        name: its precision, and how it begins.
        loss: above BF16, over the last tenth of training.
        held_out: likewise, on text that was not trained on.
        ms: of a layer, forward and backward, on average over the run.
        units: what a layer saves for its backward pass, in units of its input in BF16.
    """

    name: str
    loss: Effect
    held_out: Effect
    ms: float
    units: float


def ways() -> list[Way]:
    """The ways whose loss has been measured, the slowest first; BF16 is among them."""
    training, held_out = (effects(*STUDY, held_out=held).effects for held in (None, "own"))
    bf16, exact = layer("coat_jax BF16"), Effect(0.0, 0.0, 0.0, 1.0, 1.0, 0)
    found = [Way("BF16", exact, exact, bf16["ms"], unit("BF16"))]
    for (precision, begins_in_bf16), arm in WAYS.items():
        if arm not in training:
            continue
        ms, name = layer(f"coat_jax {precision}")["ms"], precision
        if begins_in_bf16:
            recomputing = bf16["ms"] + bf16["forward_ms"]
            ms = BF16_SHARE * recomputing + (1 - BF16_SHARE) * ms
            name += ", first quarter in BF16"
        # These two save what COAT saves: only their forward passes differ from COAT's.
        saved = unit("COAT" if precision in ("COAT_PAPER", "COAT_INT8") else precision)
        found.append(Way(name, training[arm], held_out[arm], ms, saved))
    return sorted(found, key=lambda way: -way.ms)


def table(found: list[Way]) -> list[list[str]]:
    """A header, then a row for each way."""
    rows = [["precision", "ms a layer", "saved, U", "training loss", "held-out loss", "seeds"]]
    for way in found:
        costs = ["0", "0", ""]
        if way.loss.seeds:
            costs = [cell(way.loss), cell(way.held_out), str(way.loss.seeds)]
        rows.append([way.name, f"{way.ms:.1f}", f"{way.units:.1f}", *costs])
    return rows


def draw(found: list[Way], path: Path) -> None:
    """Loss against what a layer saves, and against its time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(records.CHART | {"axes.grid.axis": "both"}):
        figure, both = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
        labels = "saved by a layer, U", "milliseconds a layer, forward and backward"
        for axes, label in zip(both, labels, strict=True):
            for number, way in enumerate(found):
                axes.errorbar(
                    way.units if axes is both[0] else way.ms,
                    100 * way.loss.mean,
                    yerr=100 * way.loss.half,
                    fmt="o",
                    color=records.LINES[number % len(records.LINES)],
                    label=way.name,
                )
            axes.axhline(0, color=records.INK, lw=0.8)
            axes.set_xlabel(label)
        both[0].set_ylabel("training loss above BF16, %")
        both[1].legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8)
        figure.suptitle("What each precision costs in loss, and what it saves")
        figure.savefig(path)
        plt.close(figure)


def main() -> None:
    """Prints the table and draws the picture."""
    options = parser_of(__doc__).parse_args()
    found = ways()
    for row in table(found):
        print(f"{row[0]:32}" + "".join(f"{cell:>18}" for cell in row[1:]))
    options.out.mkdir(parents=True, exist_ok=True)
    draw(found, options.out / "tradeoff.png")


if __name__ == "__main__":
    main()
