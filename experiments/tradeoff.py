"""Loss against memory and time, by preset: the picture of docs/choosing.md.

    python -m experiments.tradeoff

This measures nothing. Losses above BF16's are those of loss_study's runs of 124 million parameters
with Muon, the shorter ones where there are any; the time of a layer comes from gpu_suite, and what
it saves for its backward pass from activation_memory, both at Llama-2-7B's sizes.
"""

from pathlib import Path

from experiments import records
from experiments.command import parser_of
from experiments.published.loss import BY_MUON, PRESETS, effects, layer_ms, layer_units

STUDIES = ("124m", "124m_longer")  # the first that has a preset


def draw(path: Path) -> None:
    """Draws the cost of each preset against what a layer saves, and against its time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(records.CHART | {"axes.grid.axis": "both"}):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), sharey=True)
        for preset, color in zip(("BF16", *PRESETS), records.LINES, strict=False):
            name, mean, half = preset.strip("`"), 0.0, 0.0
            if preset in PRESETS:
                arm = PRESETS[preset][BY_MUON]
                costs = next(known for s in STUDIES if arm in (known := effects(s).effects))
                mean, half = 100 * costs[arm].mean, 100 * costs[arm].half
            for axes, x in ((left, layer_units(name)), (right, layer_ms(name))):
                axes.errorbar(x, mean, yerr=half, fmt="o", color=color, label=name)
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
