"""Loss against memory and time, by preset: the picture of docs/loss.md.

    python -m experiments.tradeoff

This measures nothing. Losses above BF16's are those of loss_study's runs of 124 million parameters
with Muon; the time of a layer comes from layer_speed, and what it saves for its backward pass from
activation_memory, both at Llama-2-7B's sizes.
"""

from pathlib import Path

from experiments import records
from experiments.command import parser_of
from experiments.published.loss import PRESETS, effects, layer_ms, layer_units

STUDY = "124m_longer"
DRAWN = ("BF16", "FP8_LINEAR", "COAT", "COAT_LEAN", "COAT_INT8", "COAT_PAPER")


def draw(path: Path) -> None:
    """Draws the cost of each preset against what a layer saves, and against its time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(records.CHART | {"axes.grid.axis": "both"}):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), sharey=True)
        for preset, color in zip(DRAWN, records.LINES, strict=False):
            mean = half = 0.0
            if preset != "BF16":
                cost = effects(STUDY).effects[PRESETS[f"`{preset}`"][2]]
                mean, half = 100 * cost.mean, 100 * cost.half
            for axes, x in ((left, layer_units(preset)), (right, layer_ms(preset))):
                axes.errorbar(x, mean, yerr=half, fmt="o", color=color, label=preset)
                axes.axhline(0, color=records.INK, lw=0.8)
        left.set_ylabel("training loss above BF16, %")
        left.set_xlabel("saved by a layer, U")
        right.set_xlabel("milliseconds a layer, forward and backward")
        figure.legend(*left.get_legend_handles_labels(), loc="outside right center", fontsize=8)
        figure.suptitle("What each preset costs in loss (124 million parameters, Muon)")
        figure.savefig(path)
        plt.close(figure)


def main() -> None:
    """Draws the picture."""
    options = parser_of(__doc__).parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    draw(options.out / "tradeoff.png")


if __name__ == "__main__":
    main()
