"""Loss against memory and time: each way to train, with what it costs and what it saves.

    python -m experiments.tradeoff     prints the table and draws tradeoff.png

This measures nothing. Losses above BF16's come from two of loss_study's runs; the time of a layer
comes from layer_speed, and what it saves for its backward pass from activation_memory, both at
Llama-2-7B's sizes. A run that begins in BF16 recomputes each layer in these steps, so it needs no
more memory, but runs the forward pass twice.
"""

from pathlib import Path
from typing import Any, NamedTuple

from experiments import records
from experiments.command import parser_of
from experiments.figures.measured.layers import layer, unit
from experiments.figures.measured.loss_study import STANDARD, STUDY, cell, effects
from experiments.loss_study.statistics import Comparison, Effect

BF16_SHARE = 0.25  # of the runs that begin in BF16


class Study(NamedTuple):
    """The runs of a model.

    Attributes:
        words: what they are, for the picture.
        short: for the table.
        runs: size, learning rate and steps.
        muon: whether Muon trained, and not AdamW.
        arms: the arm for a precision, and for one with the first quarter in BF16.
    """

    words: str
    short: str
    runs: tuple[str, float, int]
    muon: bool
    arms: dict[tuple[str, bool], str]

    def effects(self, held_out: str | None = None) -> Comparison:
        """What the arms cost in training loss, or in held-out loss."""
        return effects(*self.runs, muon=self.muon, held_out=held_out)


STUDIES = (
    Study(
        "124 million parameters, Muon",
        "124 M, Muon",
        STANDARD,
        True,
        {
            ("FP8_LINEAR", False): "muon_products",
            ("COAT_PAPER", False): "muon_coat_paper",
            ("COAT", False): "muon_coat",
            ("COAT_LEAN", False): "muon_coat_lean",
            ("COAT_INT8", False): "muon_coat_int8",
        },
    ),
    Study(
        "40 million parameters, AdamW",
        "40 M, AdamW",
        STUDY,
        False,
        {
            ("FP8_LINEAR", False): "products",
            ("COAT_PAPER", False): "coat_rounded_forward",
            ("COAT", False): "coat",
            ("COAT_LEAN", False): "coat_lean",
            ("COAT_INT8", False): "coat_int8",
            ("COAT", True): "coat_after_bf16",
            ("COAT_LEAN", True): "coat_lean_after_bf16",
        },
    ),
)


class Cost(NamedTuple):
    """What a way to train costs, relative to BF16.

    Attributes:
        training: loss over the last tenth of training.
        held_out: loss on text that was not trained on.
    """

    training: Effect
    held_out: Effect


class Way(NamedTuple):
    """One way to train.

    Attributes:
        name: its precision, and how it begins.
        costs: in each of `STUDIES`; None where it was not measured.
        ms: of a layer, forward and backward, on average over the run.
        units: what a layer saves for its backward pass, in units of its input in BF16.
    """

    name: str
    costs: list[Cost | None]
    ms: float
    units: float


def ways() -> list[Way]:
    """The ways whose loss has been measured, the slowest first; BF16 is among them."""
    bf16, exact = layer("coat_jax BF16"), Effect(0.0, 0.0, 0.0, 1.0, 1.0, 0)
    zero: list[Cost | None] = [Cost(exact, exact) for _ in STUDIES]
    found = [Way("BF16", zero, bf16["ms"], unit("BF16"))]
    for precision, begins_in_bf16 in dict.fromkeys(way for study in STUDIES for way in study.arms):
        ms, name = layer(f"coat_jax {precision}")["ms"], precision
        if begins_in_bf16:
            recomputing = bf16["ms"] + bf16["forward_ms"]
            ms = BF16_SHARE * recomputing + (1 - BF16_SHARE) * ms
            name += ", first quarter in BF16"
        # These two save what COAT saves: only their forward passes differ from COAT's.
        saved = unit("COAT" if precision in ("COAT_PAPER", "COAT_INT8") else precision)
        costs = [_cost(study, (precision, begins_in_bf16)) for study in STUDIES]
        found.append(Way(name, costs, ms, saved))
    return sorted(found, key=lambda way: -way.ms)


def _cost(study: Study, way: tuple[str, bool]) -> Cost | None:
    arm = study.arms.get(way)
    if arm is None:
        return None
    return Cost(study.effects().effects[arm], study.effects(held_out="own").effects[arm])


def table(found: list[Way]) -> list[list[str]]:
    """A header, then a row for each way."""
    losses = [f"{kind}, {study.short}" for study in STUDIES for kind in ("training", "held out")]
    rows = [["precision", "ms a layer", "saved, U", *losses]]
    for way in found:
        cells = [text for cost in way.costs for text in _cells(cost)]
        rows.append([way.name, f"{way.ms:.1f}", f"{way.units:.1f}", *cells])
    return rows


def _cells(cost: Cost | None) -> list[str]:
    if cost is None:
        return ["", ""]
    return [cell(one) if one.seeds else "0" for one in cost]


def draw(found: list[Way], path: Path) -> None:
    """For each study, loss against what a layer saves, and against its time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(records.CHART | {"axes.grid.axis": "both"}):
        figure, rows = plt.subplots(2, 2, figsize=(11, 7.6), sharex="col")
        for study, (number, axes) in zip(STUDIES, enumerate(rows), strict=True):
            _draw_study(axes, found, number)
            axes[0].set_title(study.words, loc="left", fontsize=10)
            axes[0].set_ylabel("training loss above BF16, %")
        rows[1][0].set_xlabel("saved by a layer, U")
        rows[1][1].set_xlabel("milliseconds a layer, forward and backward")
        handles, names = rows[1][0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside right center", fontsize=8)
        figure.suptitle("What each precision costs in loss, and what it saves")
        figure.savefig(path)
        plt.close(figure)


def _draw_study(both: Any, found: list[Way], number: int) -> None:
    for place, way in enumerate(found):
        cost = way.costs[number]
        if cost is None:
            continue
        for axes, x in zip(both, (way.units, way.ms), strict=True):
            axes.errorbar(
                x,
                100 * cost.training.mean,
                yerr=100 * cost.training.half,
                fmt="o",
                color=records.LINES[place % len(records.LINES)],
                label=way.name,
            )
    for axes in both:
        axes.axhline(0, color=records.INK, lw=0.8)
        axes.set_ylim(-0.1, 1.0)  # an interval of few seeds may leave the picture


def main() -> None:
    """Prints the table and draws the picture."""
    options = parser_of(__doc__).parse_args()
    found = ways()
    for row in table(found):
        print(f"{row[0]:32}" + "".join(f"{cell:>24}" for cell in row[1:]))
    options.out.mkdir(parents=True, exist_ok=True)
    draw(found, options.out / "tradeoff.png")


if __name__ == "__main__":
    main()
